"""The native API from the other side: a library for programs, and the terminal client made of it.

It knows the service's protocol and nothing else of the project.
"""

from crucible.client.api import Arrival, Client, Done, Health, Metrics, Token
from crucible.client.http import UnreachableError
from crucible.client.link import Link

__all__ = ["Arrival", "Client", "Done", "Health", "Link", "Metrics", "Token", "UnreachableError"]
