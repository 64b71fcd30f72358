"""Models by name: which files a model needs, where the Hugging Face hub's cache has them, and how they are fetched.

The cache and the login are huggingface_hub's own, so what other programs have downloaded is found, and the reverse.
That library reads its own environment variables: HF_ENDPOINT, HF_HUB_CACHE, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE. Large
files are fetched here: the library starts an interrupted file anew, and does not check what it fetched over HTTP.
"""
