"""An OpenAI-compatible server on an engine's slots: HTTP in front, one thread that owns the queue behind."""
