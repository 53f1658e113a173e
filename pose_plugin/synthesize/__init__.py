"""Long-document question answering data from documents of one's own, through any OpenAI-compatible endpoint."""
