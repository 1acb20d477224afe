from .steps import Profile as Profile, measure as measure
