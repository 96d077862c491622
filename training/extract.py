"""`force_documents`; the extraction to disk follows."""

from training.force import force_documents

__all__ = ["force_documents"]
