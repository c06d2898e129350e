"""`python -m actors --run RUN --index I`: one actor process of a run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from common import cli, keys
from common.addresses import Addresses, AddressesError
from common.config import RunConfig
from common.validate import Vocabulary
from common.waits import Waits
from common.wire import Tls

log = logging.getLogger("actors")


async def act(run: Path, config: RunConfig, index: int) -> None:
    """Serve the run until the learner has no more work, or SIGTERM. Raises AddressesError, CodecError, TemplateError."""
    from actors.agents import Parts
    from actors.codec import load_model_files
    from actors.conversation import conversation
    from actors.engines import Engines
    from actors.envs import Envs
    from actors.history import Rules, check_room
    from actors.learner_client import Learner
    from actors.places import PlaceRules
    from actors.pool import Pool
    from actors.summaries import Summaries
    from actors.toolcalls.turns import TurnParser

    addresses = Addresses.read(run)
    files = load_model_files(run / "model")
    chat = conversation(files, config.chat)
    for domain in config.domains:
        limits = domain.limits
        try:
            check_room(chat, Rules.of(domain.context.policy), limits.max_tokens, limits.max_new_tokens)
        except ValueError as error:
            raise cli.ConfigError(f"domains.{domain.name}: {error}") from error
    parser = TurnParser(files.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)
    vocabulary = Vocabulary(rows=files.rows, sampleable=len(files.codec.pieces))
    tls = Tls(config.tls.cert, config.tls.key, config.tls.ca)
    rules = PlaceRules(config.places, config.engine.choice)
    waits = Waits()
    engines = Engines(vocabulary, config.engine.timeout_s, rules, index, keys.of_run(run, config), waits)
    envs = Envs(addresses.envs, tls, seed=index, waits=waits)
    learner = Learner(addresses.learner, f"actor-{index}", tls)
    summaries = Summaries()
    pool = Pool(learner, Parts(chat, parser, vocabulary, engines, envs, summaries, waits), config.actors.rollouts)
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, pool.stop)
    log.info(
        "actor-%d: %d slots, learner %s, domains %s", index, config.actors.rollouts, addresses.learner, sorted(addresses.envs)
    )
    try:
        await pool.run()
    finally:
        await engines.close()
        await envs.close()
        await summaries.close()
        await learner.close()
    log.info("actor-%d: done: %s", index, dict(pool.outcomes))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m actors", description="One actor process of a run.")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--index", type=int, default=0, help="which of the run's actors this is")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from actors.chat import TemplateError
    from actors.codec import CodecError

    try:
        asyncio.run(act(arguments.run, cli.load(arguments.run / "config.toml"), arguments.index))
    except (cli.ConfigError, AddressesError, CodecError, TemplateError) as error:
        return cli.refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
