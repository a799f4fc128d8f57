"""The HTTP service: a gallery searched, shown and changed from a browser or a program (`idml.server.serve.serve`)."""
