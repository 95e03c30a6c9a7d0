"""Data, model and algorithm of a configuration, put together; what does not fit is said."""

from __future__ import annotations

from pathlib import Path

import torch

from fedtailor import algorithms, data, models
from fedtailor.core.me import Setting
from fedtailor.core.model import Model
from fedtailor.data.federated import FederatedData
from fedtailor.errors import ConfigError
from fedtailor.privacy import noise
from fedtailor.privacy.rehearsal import rehearse
from fedtailor.privacy.sealed import Privacy
from fedtailor.runs.config import RunConfig
from fedtailor.runs.newcomers import hold_out


def setting_of(config: RunConfig, data_root: Path | None = None, loaded: FederatedData | None = None) -> Setting:
    """Data, model and algorithm of a configuration, put together; `loaded` is its data if it was read before."""
    federated, unseen = loaded or data.load(config.data, seed=config.seed, root=data_root), None
    if config.evaluation.unseen is not None:
        federated, unseen = hold_out(federated, config.evaluation.unseen, config.seed)
    return put_together(config, federated, unseen)


def put_together(config: RunConfig, federated: FederatedData, unseen: FederatedData | None = None) -> Setting:
    """Model and algorithm of a configuration for data that is there already."""
    algorithm = algorithms.make(config.algorithm.name, config.algorithm.options)
    dtype = getattr(torch, config.model.dtype)
    federated, unseen = federated.to(dtype), None if unseen is None else unseen.to(dtype)
    model = model_of(config, federated.shape, federated.outputs)
    if config.model.prior == "label" and federated.task != "classification":
        raise ConfigError(f'model.prior = "label": for classification, not {federated.task}')
    _reads(model, config.model.name, federated)
    algorithm.check(model, federated.task)
    algorithm.check_solver(config.local.solver)
    if config.local.augment is not None and len(federated.shape) != 3:
        raise ConfigError(f'local.augment = "{config.local.augment}": for images, not {federated.name}')
    if config.federation.clients_per_round > len(federated.clients):
        raise ConfigError(
            f"federation.clients_per_round = {config.federation.clients_per_round}: "
            f"there are only {len(federated.clients)} clients"
        )
    if config.federation.min_replies > (config.federation.clients_per_round or len(federated.clients)):
        raise ConfigError(f"federation.min_replies = {config.federation.min_replies}: more than the clients of a round")
    environment = config.environment.made(len(federated.clients), config.seed)
    if environment.missing == "stale" and not algorithm.stale:
        able = [name for name, kind in algorithms.algorithms().items() if kind.stale]
        raise ConfigError(
            f'environment.missing = "stale": {algorithm.title or config.algorithm.name} has no mean that could '
            f"count those who did not answer; able to: {', '.join(able)}"
        )
    privacy = config.privacy.made()
    setting = Setting(
        algorithm,
        model,
        federated,
        config.local.solver,
        config.seed,
        environment,
        unseen,
        clip=privacy.clip,
        is_sealed=privacy.secure_sum,
    )
    if privacy.is_sealed:
        _can_be_private(setting, config, privacy)
    return setting


def _can_be_private(setting: Setting, config: RunConfig, privacy: Privacy) -> None:
    """Refuse before the first round what could not be kept."""
    if privacy.noise:
        noise.require()
        if config.environment.missing == "stale":
            raise ConfigError('privacy.noise: not with environment.missing = "stale", which counts by sample counts')
        if setting.model.has_common_statistics:
            raise ConfigError('privacy.noise: variances with noise may be negative; set model.buffers = "private"')
    if privacy.secure_sum:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise ConfigError(f"privacy.secure_sum: the package cryptography is missing; {noise.INSTALL}") from None
        if config.data.source == "sites":  # over a network, and who takes part is not known yet
            pass
        elif config.federation.engine not in ("auto", "wire"):
            raise ConfigError(
                f'privacy.secure_sum: not with federation.engine = "{config.federation.engine}", where server and '
                'clients share their memory; use "wire"'
            )
        elif (config.federation.clients_per_round or len(setting.data.clients)) < 2:
            raise ConfigError("privacy.secure_sum: a sum over one client is its reply; at least 2 are needed")
    rehearse(setting, privacy)


def model_of(config: RunConfig, shape: tuple[int, ...], outputs: int) -> Model:
    """The model of a configuration for samples of a shape."""
    return models.build(
        config.model.name,
        shape,
        outputs,
        seed=config.seed,
        head=config.model.head,
        options=config.model.options,
        buffers=config.model.buffers,
        prior=config.model.prior == "label",
        dtype=getattr(torch, config.model.dtype),
    )


def _reads(model: Model, name: str, federated: FederatedData) -> None:
    """Text is numbers of characters: most models cannot read it, which is better said before the first round."""
    if not federated.train.x.is_floating_point():
        try:
            with torch.no_grad():
                model(model.params | model.private_buffers, federated.train.x[:2])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"model.name: {name} does not read {federated.name}, which is text: {error}") from None
