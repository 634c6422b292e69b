"""What `isthmus doctor` looks at: one file a subject, each a function from a `System` to findings.

Reads /proc, /sys and what drivers tell, below a root that tests draw. Never needs root, never changes
anything, imports no torch.
"""
