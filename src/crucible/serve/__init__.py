"""The service: an HTTP process that speaks text and several APIs, and an engine process that owns the device."""
