"""ChatBackend over another OpenAI server: requests passed on, answers passed back unchanged and kept in our books."""
