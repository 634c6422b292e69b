"""From requests to tokens: what to compute next, the step, the sampling, and text around it."""
