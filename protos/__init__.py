"""The contracts between the roles; the generated modules beside this file are built, never committed."""
