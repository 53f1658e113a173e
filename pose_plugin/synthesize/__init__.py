"""Long-document question answering data from your own documents, through any OpenAI-compatible endpoint."""
