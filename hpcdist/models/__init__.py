"""Models: lists of stages with explicit forward and backward. Pure functions on arrays, without ranks or messages.

Floor 3: imports only packages of lower floors. `layers`, `attention` and `experts` compute, `arena` holds
activations, and `counts` computes parameters, FLOPs and memory. Start with `build` and `model.Model`.
"""

from typing import TYPE_CHECKING

from hpcdist.models.config import FOREIGN, TRANSFORMERS

if TYPE_CHECKING:
    from hpcdist.models.config import ModelConfig
    from hpcdist.models.model import Model


def build(
    config: "ModelConfig",
    dtype: str = "float32",
    *,
    context: int = 0,
    features: int = 0,
    classes: int = 0,
    height: int = 0,
    width: int = 0,
    channels: int = 0,
) -> "Model":
    """Build the model that ``config`` describes. The keyword arguments are the sizes of the data.

    Transformers need ``context``. An mlp needs ``features`` and ``classes``. A convnet needs ``height``, ``width``,
    ``channels`` and ``classes``. ``dtype`` "bfloat16" and "float16" need a GPU. Raises ConfigurationError.
    """
    # Imported late, to keep `models.config` and `hpcdist --help` light.
    from hpcdist.models import classifiers, transformer
    from hpcdist.models.experts.mixture import with_experts
    from hpcdist.models.model import LOCAL, Model

    if config.kind in FOREIGN:
        from hpcdist.models import factory

        sizes = {"context": context, "features": features, "classes": classes}
        sizes |= {"height": height, "width": width, "channels": channels}
        return factory.make(config, dtype, {name: value for name, value in sizes.items() if value})
    if config.kind in TRANSFORMERS:
        causal = config.kind == "gpt"
        stages = transformer.transformer_stages(config, context, causal=causal)
        predictions = int if causal else transformer.masked_predictions
        operations = with_experts(LOCAL, config, predictions)
        return Model(stages, dtype, tokens_per_sample=predictions(context), operations=operations)
    if config.kind == "convnet":
        return Model(classifiers.convnet_stages(config, height, width, channels, classes), dtype, tokens_per_sample=1)
    return Model(classifiers.mlp_stages(config, features, classes), dtype, tokens_per_sample=1)
