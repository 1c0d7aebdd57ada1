"""The pure state machine of the service: commands in, events out, and the state they make."""
