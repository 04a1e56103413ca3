"""Command lines to frozen configs, and the one way a process starts, reports and ends.

Every field of a config dataclass is a flag of the same name (`max_total_tokens` is
`--max-total-tokens`; a unit suffix `_s` is left out). Anything wrong is one line on stderr and
exit code 2.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import logging
import math
import os
import re
import signal
import ssl
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Protocol, Union, get_args, get_origin, get_type_hints

from model.errors import MemoryShortage, ModelError, NodeLost
from transfer import logs, open_files, open_threads, signals, terminal
from transfer.checks import NamedPath, is_there
from transfer.errors import ConfigError, Incompatible, KvferryError, Unauthenticated
from transfer.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED
from transfer.flag_names import flag_name, hint
from transfer.open_threads import NO_THREAD
from transfer.rpc import Security

TOKEN_ENV = "KVFERRY_CLUSTER_TOKEN"
API_KEY_ENV = "KVFERRY_API_KEY"
_SECRETS = {"api_key": API_KEY_ENV}  # by field; anybody can read a command line
NOTIFY_ENV = "KVFERRY_NOTIFY_FD"
LIFELINE_ENV = "KVFERRY_LIFELINE_FD"

MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4096  # every call carries it in a header, and gRPC bounds headers by 8 KiB
_MOST = (1 << 63) - 1
_PR_SET_PDEATHSIG = 1
_OF_JAX = re.compile(r"for environment 'JAX_|for JAX flag jax_")
_FLAG = re.compile(r"--?[a-zA-Z]|--.")  # not a negative number, nor "--" alone

_orphaned: list[Callable[[], None]] = []  # callbacks of when_orphaned


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse, but report a misspelt flag before the required one that it leaves missing.

        An argument that is no UTF-8 is an error: names and paths travel in messages and answers.
        """
        words = list(sys.argv[1:] if args is None else args)
        for word in words:
            if word != word.encode(errors="replace").decode():
                self.error(f"expected UTF-8, got {word!r}")
        flags = [word.partition("=")[0] for word in words if _FLAG.match(word)]
        if self._subparsers is not None:
            flags = []  # most belong to the subcommand, whose parser sees them next
        elif words and words[0] and words[0][0] != "-" and not self._get_positional_actions():
            model = "; --model-path takes the model's folder"
            given = self._option_string_actions
            self.error(f"unexpected {words[0]!r}{model if '--model-path' in given else ''}")
        for flag in flags:
            # A word with a blank is a value, as of --server-args "--tp-size 2".
            if flag not in self._option_string_actions and " " not in flag:
                self.error(f"unknown flag {flag}{hint(flag, self._option_string_actions)}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        terminal.complain(f"{self.prog}: {message} (see {self.prog} --help)")
        raise SystemExit(EXIT_CONFIG)


class TakesFlags(Protocol):
    """An argument parser, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def add_flags(
    parser: TakesFlags,
    config: type[Any],
    help_texts: dict[str, str],
    prefix: str = "",
    skip: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """One flag per field of a config dataclass.

    prefix: put in front of each name ("prefill" gives --prefill-tp-size); such flags are only
    set in the namespace when given. skip: fields without a flag. optional: required fields
    that may be left out here because the caller fills them in.
    """
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in skip:
            continue
        name = flag_name(f"{prefix}_{field.name}" if prefix else field.name)
        required = field.default is dataclasses.MISSING and field.name not in optional
        options: dict[str, Any] = {
            "help": help_texts[field.name].replace("%", "%%"),
            "dest": f"{prefix}_{field.name}" if prefix else field.name,
        }
        if prefix or field.name in optional:
            options["default"] = argparse.SUPPRESS
            if not prefix and field.default not in (dataclasses.MISSING, "", ()):
                options["help"] += f" (default: {field.default})"
        elif required:
            options["required"] = True
        else:
            variable = _SECRETS.get(field.name, "")
            options["default"] = os.environ.get(variable, field.default)
            if field.default not in ("", ()):
                options["help"] += " (default: %(default)s)"
        options.update(_value_options(hints[field.name]))
        parser.add_argument(name, **options)


def _value_options(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "metavar": "{" + ",".join(get_args(hint)) + "}"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Union:
        return _number_or_word(hint)
    if get_origin(hint) is tuple and get_args(hint)[0] is NamedPath:
        how = {"type": _named_path, "metavar": "NAME=PATH"}
        # May come several times. With a default, that would be what it extends.
        return how | {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
    if get_origin(hint) is tuple:
        return {"type": _texts, "metavar": "JSON"}
    if isinstance(hint, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    read = {int: _whole, float: _finite, Path: path}.get(hint, hint)
    return {"type": read, "metavar": hint.__name__.upper()}


def _number_or_word(hint: Any) -> dict[str, Any]:
    """Options for a number or one of a few words: int | Literal["auto"]."""
    number, literal = get_args(hint)
    words = get_args(literal)
    assert number is int, hint

    def read(text: str) -> Any:
        try:
            return text if text in words else _whole(text)
        except argparse.ArgumentTypeError:
            message = f"expected {' or '.join(words)} or a number, got {text!r}"
            raise argparse.ArgumentTypeError(message) from None

    return {"type": read, "metavar": "{" + ",".join([*words, number.__name__.upper()]) + "}"}


def _texts(text: str) -> tuple[str, ...]:
    """A list of texts, given as JSON (as in vLLM) so that it can hold any text."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        message = f"""expected a JSON list of texts, such as '["a"]', got {text!r}"""
        raise argparse.ArgumentTypeError(message)
    return tuple(value)


def _named_path(text: str) -> NamedPath:
    name, _, place = text.partition("=")
    if not name or not place or not name.isprintable():
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return NamedPath(name, Path(place))


def path(text: str) -> Path:
    """A flag's path. An empty one, as from an unset variable, would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def _whole(text: str) -> int:
    """An int of 64 bits: messages and answers, in which flags are repeated, hold no larger ones."""
    try:
        value = int(text)
    except ValueError:
        value = _MOST + 1
    if not -_MOST <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return value


def _finite(text: str) -> float:
    """A float other than nan and inf, which would pass comparisons and limits unnoticed."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"invalid float value: {text!r}")
    return value


def config_from[C](config: type[C], args: argparse.Namespace, prefix: str = "", **more: Any) -> C:
    """The config from these arguments; prefixed ones win over plain ones, `more` over both.

    Raises ConfigError from the config's own validation.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        for dest in (field.name, f"{prefix}_{field.name}"):
            if hasattr(args, dest):
                value = getattr(args, dest)
                values[field.name] = tuple(value) if isinstance(value, list) else value
    values.update(more)
    return config(**values)


def argv_of(config: Any) -> list[str]:
    """The flags that reproduce a config, without defaults and without its secrets."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default or field.name in _SECRETS:
            continue
        name = flag_name(field.name)
        if isinstance(value, bool):
            argv.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple) and isinstance(value[0], NamedPath):
            argv += [f"{name}={one}" for one in value]
        elif isinstance(value, tuple):
            argv.append(f"{name}={json.dumps(value)}")
        else:
            argv.append(f"{name}={value}")
    return argv


def secrets_of(config: Any) -> tuple[tuple[str, str], ...]:
    """The config's secrets as environment variables, to go with `argv_of`."""
    names = _SECRETS.keys() & {field.name for field in dataclasses.fields(config)}
    return tuple((_SECRETS[name], getattr(config, name)) for name in names)


# --- security ---------------------------------------------------------------------------------


def add_security_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster security")
    group.add_argument(
        "--cluster-token-file",
        type=path,
        default=None,
        metavar="FILE",
        help=f"file with the secret that all processes of a cluster share; default: ${TOKEN_ENV}",
    )
    for name, what in (
        ("ca", "CA certificates that must have signed those of peers"),
        ("cert", "certificate of this process"),
        ("key", "private key of that certificate, unencrypted"),
    ):
        group.add_argument(
            f"--tls-{name}-file", type=path, default=None, metavar="FILE", help=f"TLS: {what}"
        )


def security_from(args: argparse.Namespace) -> Security:
    """The cluster token and TLS files. Raises ConfigError when there is no token."""
    tls = (args.tls_ca_file, args.tls_cert_file, args.tls_key_file)
    if any(tls) and not all(tls):
        raise ConfigError("--tls-ca-file, --tls-cert-file and --tls-key-file go together")
    if all(tls):
        _check_tls(*tls)
    if args.cluster_token_file is not None:
        try:
            with args.cluster_token_file.open() as file:
                token = file.read(2 * MAX_TOKEN_CHARS).strip()  # the wrong file may be huge
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--cluster-token-file {args.cluster_token_file}: {error}") from error
    else:
        token = token_of_environment()
    return Security(checked_token(token), *tls)


def token_of_environment() -> str:
    """The cluster token of the environment, unchecked; "" if there is none."""
    return os.environ.get(TOKEN_ENV, "").strip()


def checked_token(token: str) -> str:
    """The same. Raises ConfigError when it is no cluster token."""
    if len(token) > MAX_TOKEN_CHARS:
        raise ConfigError(
            f"a cluster token of at most {MAX_TOKEN_CHARS} characters is needed, got more"
        )
    if len(token) < MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        got = len(token) if len(token) < MIN_TOKEN_CHARS else "some not printable in ASCII"
        raise ConfigError(
            f"a cluster token of at least {MIN_TOKEN_CHARS} characters is needed, got {got}: "
            f"give --cluster-token-file or ${TOKEN_ENV} (openssl rand -hex 32 makes one)"
        )
    return token


def _check_tls(ca_file: Path, cert_file: Path, key_file: Path) -> None:
    """Read the files before anything starts: later, a bad file would look like a lost peer."""
    for file in (ca_file, cert_file, key_file):
        if not is_there("TLS", file, file.is_file):
            raise ConfigError(f"TLS: {file} is not a file")
    try:
        ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tls-ca-file {ca_file}: no CA certificates: {error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password: without one, an encrypted key would ask at the terminal.
        context.load_cert_chain(str(cert_file), str(key_file), password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert-file {cert_file} and --tls-key-file {key_file}: not a certificate and "
            f"its unencrypted key: {error}"
        ) from error


def tls_argv_of(security: Security) -> list[str]:
    """The TLS flags of these files; the token travels in the environment."""
    files = {"ca": security.ca_file, "cert": security.cert_file, "key": security.key_file}
    return [f"--tls-{name}-file={file}" for name, file in files.items() if file is not None]


# --- process ----------------------------------------------------------------------------------


def run_main(prog: str, main: Callable[[], None]) -> NoReturn:
    """Run a process's main and exit: 0 for success, 2 if the operator has to fix it, 1 otherwise.

    Exits at once when main returns: engine and I/O threads hold nothing worth waiting for.
    """
    terminal.open_missing()
    signals.forget_inherited()
    code = 0
    try:
        _watch_lifeline()
        open_files.raise_limit()
        open_threads.check_room(open_threads.FOR_ANY)
        # Under `kvferry up` the parent adds the name.
        logs.set_up("" if NOTIFY_ENV in os.environ else prog)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # replaces the import-time one
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except (ConfigError, ModelError, Incompatible, Unauthenticated) as error:
        terminal.complain(f"kvferry {prog}: {' '.join(str(error).split())}")
        code = 1 if isinstance(error, MemoryShortage) else EXIT_CONFIG
    except (KvferryError, NodeLost) as error:
        terminal.complain(f"kvferry {prog}: {' '.join(str(error).split())}")
        code = 1
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        log, told = logging.getLogger(__name__), _lack(error) or _refused_by_jax(error)
        log.log(logging.DEBUG if told else logging.ERROR, "kvferry %s failed", prog, exc_info=True)
        # A traceback may end with a note, such as JAX's on frames that it leaves out, and what
        # supervises this process quotes its last line.
        what = told or " ".join(f"{type(error).__name__}: {error}".split())
        terminal.complain(f"kvferry {prog}: {what}")
        code = EXIT_CONFIG if _refused_by_jax(error) else 1
    terminal.flush()
    os._exit(code)


def _lack(error: BaseException) -> str:
    """What the system has refused to this process; "" if the error is another."""
    if isinstance(error, MemoryError):
        what = "out of memory, or of what `ulimit -v` allows"
        return " ".join(f"{what}: {error}".split()) if str(error) else what
    if "os error 11" in str(error):  # of threads in Rust
        error = RuntimeError(NO_THREAD)
    if isinstance(error, RuntimeError) and str(error) == NO_THREAD:
        return f"{error}: {open_threads.LIMITS}"
    return ""


def _refused_by_jax(error: BaseException) -> str:
    """What JAX says of an environment variable that it does not take; "" of anything else."""
    if isinstance(error, ValueError) and _OF_JAX.search(str(error)):
        return " ".join(f"an environment variable of JAX: {error}".split())
    return ""


def log_config(config: Any) -> None:
    """One line with every value in force; keys are not shown."""
    values = {
        field.name: "***" if field.name in _SECRETS and value else value
        for field in dataclasses.fields(config)
        for value in (getattr(config, field.name),)
    }
    log = logging.getLogger(__name__)
    log.info("config: %s", " ".join(f"{name}={value}" for name, value in values.items()))


def notify_ready(**facts: Any) -> None:
    """Tell a supervising `kvferry up` that this process is ready; without one, do nothing."""
    number = os.environ.get(NOTIFY_ENV)
    if number is None:
        return
    with os.fdopen(int(number), "w") as pipe:
        json.dump(facts, pipe)


def announce(worker_id: str) -> None:
    """Report that a worker is registered and takes work."""
    logging.getLogger(__name__).info("%s is ready", worker_id)
    notify_ready(worker_id=worker_id)


def when_orphaned(clean_up: Callable[[], None]) -> None:
    """Call clean_up, in a thread, before dying with a supervisor that can no longer do it."""
    _orphaned.append(clean_up)


def _watch_lifeline() -> None:
    """Die with the supervisor, however it dies: its end of the pipe closes then."""
    number = os.environ.get(LIFELINE_ENV)
    if number is None:
        return

    def wait() -> None:
        os.read(int(number), 1)
        try:
            for clean_up in _orphaned:
                clean_up()
        finally:
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    # If this process is stopped when its supervisor dies, the kernel lets it go on, and it ends.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
