"""`onedraw completion`: print a script with which bash or zsh completes commands, options and the short names of models."""

from __future__ import annotations

import argparse

HELP = "print a script that completes commands, options and model names"
EXAMPLES = """examples:
  onedraw completion bash > ~/.local/share/bash-completion/completions/onedraw
  onedraw completion zsh > ~/.onedraw-completion; echo 'source ~/.onedraw-completion' >> ~/.zshrc
"""
SCRIPT = """_onedraw() {{
  local words="{commands}"
  if (( COMP_CWORD > 1 )); then
    case "${{COMP_WORDS[1]}}" in
{cases}
      *) words="" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _onedraw onedraw
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")


def run(arguments: argparse.Namespace) -> int:
    print("autoload -U +X bashcompinit && bashcompinit\n" * (arguments.shell == "zsh") + script(), end="")
    return 0


def script() -> str:
    """Return the completion script. zsh runs it through its emulation of bash's completion."""
    from onedraw.checkpoints.catalogue import CATALOGUE
    from onedraw.cli.main import COMMANDS, command_parser

    cases = [f'      help) words="{" ".join(COMMANDS)}" ;;']
    for name in COMMANDS:
        actions = [action for action in command_parser(name)._actions if action.help is not argparse.SUPPRESS]
        words = [option for action in actions for option in action.option_strings if option.startswith("--")]
        if any(action.dest == "model" for action in actions):
            words += CATALOGUE
        cases.append(f'      {name}) words="{" ".join(words)}" ;;')
    return SCRIPT.format(commands=" ".join(("help", *COMMANDS)), cases="\n".join(cases))
