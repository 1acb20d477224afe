"""Shows where the time of a training step goes, and measures what would make it faster: `hookdiff profile`."""

from hookdiff_profile.steps import Profile, measure

__all__ = ["Profile", "measure"]
