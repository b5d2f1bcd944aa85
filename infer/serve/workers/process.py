"""End of a worker's channel, for importers of its former place."""

from ...process.channel import ClosedError as ClosedError
