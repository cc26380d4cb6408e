"""HTTP gateway: the APIs of OpenAI, Cohere, Jina and TEI in front of any Triton with pipelines."""
