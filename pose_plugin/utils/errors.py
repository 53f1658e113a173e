"""The exceptions of the package. Each message names the key, its value, the limit and the fix."""


class PoSEError(ValueError):
    """Something that the user can fix: a setting, a model or a data set that cannot work as it is."""


class RopeMismatchError(PoSEError):
    """The live model's rotary frequencies differ from the requested ones."""


class SelfTestError(PoSEError):
    """The model, collator and attention implementation together would train without learning."""


FORGOTTEN_LINE = (
    "the config has a `pose:` block, but `plugins:` does not name the plugin that reads it, so it would have no "
    "effect. Add `plugins: [pose_plugin]`, or remove the block"
)
