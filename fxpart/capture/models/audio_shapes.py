"""Shapes of recordings, their spectrograms and their codes."""

from torch import nn

from fxpart.capture.models.shape_request import (
    AUDIO,
    MEL_BINS,
    Request,
    Shape,
    documented,
    part_setting,
    unknown,
)

__all__ = [
    "DEFAULT_CODES",
    "audio_shape",
    "channels_shape",
    "feature_mask_shape",
    "feature_shape",
]

_DEFAULT_AUDIO_SAMPLES = 160_000
"""Ten seconds at 16 kHz, the usual rate of speech models."""
DEFAULT_CODES = 125
"""Latent vectors of ten seconds, at 12.5 Hz."""
_DEFAULT_SPECTROGRAM = 1024
"""Frames of about ten seconds in steps of 10 ms."""


_READERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)
"""Layers that may read a spectrogram first."""


def feature_shape(name: str, request: Request) -> Shape:
    """Return the shape of a spectrogram, with bins before frames for convolutional models."""
    config = request.model.config
    bins = part_setting(config, MEL_BINS, (*AUDIO, "encoder"))
    if type(bins) is not int:
        raise unknown(name, request)
    if part_setting(config, ("spec_size",), AUDIO) is not None:  # CLAP reads it as an image
        return Shape((request.batch_size, 1, _DEFAULT_SPECTROGRAM, bins))
    if hasattr(config, "input_feat_per_channel"):
        return Shape((request.batch_size, _DEFAULT_SPECTROGRAM, bins * config.input_channels))
    first = next((m for m in request.model.modules() if isinstance(m, nn.Conv1d)), None)
    reader = next((m for m in request.model.modules() if isinstance(m, _READERS)), None)
    if isinstance(reader, nn.Linear) and reader.in_features % bins == 0:
        joined = part_setting(config, ("subsampling_factor",), (*AUDIO, "encoder"))
        if reader.in_features != bins * (joined or 0):  # else the model joins frames itself
            bins = reader.in_features  # Granite Speech reads several frames at once
    elif first is not None and first.in_channels == bins:
        # Whisper's layout, whose convolutions halve the frames.
        half = part_setting(config, ("max_source_positions",), (*AUDIO, "encoder"))
        frames = 2 * half if type(half) is int else _DEFAULT_SPECTROGRAM
        return Shape((request.batch_size, bins, frames))
    return Shape((request.batch_size, _DEFAULT_SPECTROGRAM, bins))


def audio_shape(name: str, request: Request) -> Shape:
    """Return the shape of raw audio, or of a spectrogram if the configuration fixes its length."""
    config, batch = request.model.config, request.batch_size
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return Shape((batch, config.max_length, config.num_mel_bins))
    samples = request.seq_len or _DEFAULT_AUDIO_SAMPLES
    channels = getattr(config, "audio_channels", None)
    # A recording has one channel unless the configuration says more.
    mono = documented(name, request.model, 1) in ("1", "channels")
    if channels is None and (mono or part_setting(config, ("dac_config",), AUDIO)):
        channels = 1
    sizes = (samples,) if channels is None else (channels, samples)
    return Shape((batch, *sizes), uses_seq_len=True)


def channels_shape(name: str, request: Request) -> Shape:
    """Return the shape of a signal for a model that begins with convolutions over time."""
    first = next(
        m for m in (*request.model.modules(), None) if m is None or isinstance(m, _READERS)
    )
    if not isinstance(first, nn.Conv1d):
        raise unknown(name, request)
    frames = _DEFAULT_AUDIO_SAMPLES if first.in_channels == 1 else DEFAULT_CODES
    return Shape((request.batch_size, first.in_channels, frames))


def feature_mask_shape(name: str, request: Request) -> Shape:
    """Return the shape of the mask of a spectrogram, with one value for each frame."""
    batch, *sizes = feature_shape(name, request).sizes
    bins = part_setting(request.model.config, MEL_BINS, (*AUDIO, "encoder"))
    return Shape((batch, sizes[1] if sizes[0] == bins else sizes[0]), is_real=False)
