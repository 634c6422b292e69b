"""Answers in the words of each protocol but OpenAI's first one: pure functions of events, no IO."""
