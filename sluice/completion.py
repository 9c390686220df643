"""`sluice completion`: what a shell needs to complete commands, flags and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from sluice.config import ConfigError, hint, models_of

COMPLETION_USAGE = "sluice completion bash|zsh|fish"
DEEPEST = 3  # names of a flag; deeper ones are for files

_BASH = """\
# eval "$(sluice completion {shell})"
{prelude}_sluice() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]:-}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  else
    case "$command" in
{cases}
    esac
  fi
  case "$current" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
    *) if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "$words" -- "$current"))
       else COMPREPLY=($(compgen -f -- "$current")); fi ;;
  esac
}}
complete -o filenames -F _sluice sluice
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion_script(
    shell: str, configs: Mapping[str, type[BaseModel] | None], more: Mapping[str, Sequence[str]]
) -> str:
    """The script of a shell: `configs` by command, `more` flags that are of no configuration.

    Raises ConfigError for another shell.
    """
    flags = {
        name: ["--help", *more.get(name, ()), *(_flags(config) if config else ())]
        for name, config in configs.items()
    }
    if shell in ("bash", "zsh"):
        cases = "\n".join(
            f'      {name}) words="{" ".join(each)}" ;;' for name, each in flags.items()
        )
        prelude = _ZSH if shell == "zsh" else ""
        return _BASH.format(shell=shell, prelude=prelude, commands=" ".join(flags), cases=cases)
    if shell == "fish":
        lines = ["# sluice completion fish | source"]
        for name, each in flags.items():
            lines.append(f"complete -c sluice -n __fish_use_subcommand -a {name}")
            seen = f"__fish_seen_subcommand_from {name}"
            lines += [
                f"complete -c sluice -n '{seen}' -l {flag.removeprefix('--')}"
                for flag in each
                if flag.startswith("--")
            ]
        return "\n".join(lines) + "\n"
    near = hint(shell[:100], ("bash", "zsh", "fish"))
    raise ConfigError(f"completion: {shell[:100]!r} is no shell{near}")


def _flags(model: type[BaseModel], path: str = "", depth: int = 1) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"--{path}{name}"
        inner = next(iter(models_of(field.annotation)), None)
        if inner is not None and depth < DEEPEST:
            yield from _flags(inner, f"{path}{name}.", depth + 1)
