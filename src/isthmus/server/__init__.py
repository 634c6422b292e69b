"""The HTTP side of `isthmus serve`: OpenAI's protocol over an engine in another process. No torch here."""
