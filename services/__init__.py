"""The services, one folder each: gateway, engine, worker; common beneath them, cli and local above."""
