"""Every key of the workbench, once: bindings, palette and F1 help are made from this table."""
from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Key:
    """One action of a pane. `keys` may name several; `footer` puts it into the last line of the screen."""

    keys: str
    action: str
    label: str
    help: str
    footer: bool = False
    priority: bool = False
    display: str | None = None


KEYS: dict[str, tuple[Key, ...]] = {
    "app": (
        Key("ctrl+q", "quit", "Quit", "Leave; the engine ends with the screen", priority=True),
        Key("ctrl+o", "open_model", "Open model", "Open another base model; adapters and chat stay"),
        Key("ctrl+e", "restart_engine", "Restart engine", "Start the engine again with the same model, adapters, pins and mix"),
        Key("ctrl+c", "interrupt", "Copy, stop", "Copy the selected text; without any, stop the reply or the load", priority=True),
        Key("ctrl+z", "suspend_process", "Suspend", "Back to the shell; fg comes back here", priority=True),
    ),
    "bench": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("f9", "panels", "Panels", "Fold the side panels; on a narrow terminal, lay the adapters over the chat"),
        Key("f4", "engine", "Engine", "Slots, KV memory, step times and events on the whole screen; Esc comes back", footer=True),
        Key("escape", "stop", "Stop", "Stop the reply, or the load of a model or of adapters; what was said is kept", footer=True,
            priority=True),
        Key("escape", "focus_adapters", "Adapters", "From the prompt to the adapters, when nothing is to be stopped", footer=True,
            priority=True),
        Key("escape", "focus_prompt", "Prompt", "Back to the prompt, when nothing is to be stopped", footer=True, priority=True),
        Key("tab", "pane(1)", "Next pane", "From the prompt to the adapters, to the last reply, to the prompt", priority=True),
        Key("shift+tab", "pane(-1)", "Previous pane", "The other way round", priority=True),
        Key("ctrl+r", "regenerate", "Again", "Another version of the last reply, with the mix set now", footer=True),
        Key("ctrl+n", "new_chat", "New chat", "Empty the chat; adapters and mix stay"),
        Key("g", "toggle_sampling", "Greedy/sample", "Switch between greedy decoding and sampling at temperature 0.7"),
    ),
    "prompt": (
        Key("enter", "send", "Send", "Send the message; / starts a command, /help lists them", footer=True),
        Key("ctrl+j,shift+enter,alt+enter", "newline", "Newline", "Start a new line in the message", footer=True,
            display="^j"),
        Key("ctrl+underscore", "undo", "Undo", "Take back what was typed"),
    ),
    "reply": (
        Key("left,h", "older", "Older version", "Show the version of this reply before", footer=True, display="←"),
        Key("right,l", "newer", "Newer version", "Show the version of this reply after", footer=True, display="→"),
        Key("up,k", "previous", "Previous", "Go to the item above"),
        Key("down,j", "next", "Next", "Go to the item below"),
        Key("y", "copy", "Copy", "Copy the text of this item to the clipboard", footer=True),
        Key("enter,r", "card", "Restart", "On the card of an engine that died: start it again"),
    ),
    "adapters": (
        Key("space", "toggle", "On/off", "Switch the adapter on or off", footer=True),
        Key("left,h", "nudge(-0.05)", "Scale", "Scale down by 0.05", footer=True, display="←→"),
        Key("right,l", "nudge(0.05)", "+0.05", "Scale up by 0.05"),
        Key("shift+left,H", "nudge(-0.5)", "-0.5", "Scale down by 0.5"),
        Key("shift+right,L", "nudge(0.5)", "+0.5", "Scale up by 0.5"),
        Key("ctrl+left", "nudge(-0.01)", "-0.01", "Scale down by 0.01"),
        Key("ctrl+right", "nudge(0.01)", "+0.01", "Scale up by 0.01"),
        Key("enter,=", "type_scale", "Value", "Type an exact scale", footer=True, display="⏎"),
        Key("0", "set_scale(0)", "Scale 0", "Set the scale to 0: loaded, but without effect"),
        Key("1", "set_scale(1)", "Scale 1", "Set the scale to 1: as trained"),
        Key("s", "solo", "Solo", "Hear this adapter alone; again to end it", footer=True),
        Key("m", "bypass", "Bypass", "Hear the base alone; again to end it", footer=True),
        Key("p", "pin", "Pin", "Keep the adapter in its slot: it is not evicted"),
        Key("a", "add", "Add", "Add adapters by path; paste or drop works too", footer=True),
        Key("x", "unload", "Unload", "Forget the adapter and free its memory"),
        Key("R", "reload", "Reload", "Read the adapter's file again; a reply that runs finishes on what it began with"),
        Key("i", "details", "Details", "All facts of the adapter: modules, scales, fields, how far it moves the weights"),
        Key("f5", "effect", "Effect", "Compare the base's words with and without the adapter, over a few prompts"),
        Key("f", "invocation", "Invocation", "Set the aLoRA invocation string; empty makes it a plain LoRA"),
        Key("v", "invoke", "Invoke", "Let this aLoRA act on the chat by its invocation"),
        Key("c", "change", "Live change",
            "What a change of the mix does to a reply that is being written: splice, recompute, or finish the reply first"),
        Key("u", "undo", "Undo", "Take back the last change of the mix"),
        Key("U", "redo", "Redo", "Do again what was taken back"),
        Key("up,k", "cursor(-1)", "Up", "The adapter above"),
        Key("down,j", "cursor(1)", "Down", "The adapter below"),
    ),
    "invocation": (
        Key("ctrl+t", "in_reply", "In replies", "Let the adapter also act where the model itself writes the invocation", footer=True),
    ),
    "engine": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape,f4", "back", "Back", "Back to the chat", footer=True),
        Key("c", "clear_cache", "Clear cache", "Forget the KV blocks that no running reply holds", footer=True),
    ),
    "details": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape,i", "back", "Back", "Back to the chat", footer=True),
        Key("f5", "effect", "Effect run", "Compare the base's words with and without the adapter, over a few prompts", footer=True),
        Key("p", "insert_prefix", "Prefix to prompt", "Put the prompt prefix that the adapter expects into the prompt", footer=True),
        Key("s", "system_prefix", "Prefix as system", "Make the prompt prefix that the adapter expects the system message", footer=True),
    ),
    "load": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape", "back", "Stop, back", "Stop the load; when nothing loads, go back", footer=True),
        Key("down", "list", "List", "From the path to the list of models"),
        Key("f5", "rescan", "Look again", "Look for models on this machine again", footer=True),
    ),
}
AT_ONCE = ("adapters",)
"""panes whose keys are carried out before the next key is looked at: it may be typed into a field that they open"""
PANE_TITLES = {"app": "Anywhere", "bench": "Main screen", "prompt": "Prompt", "reply": "Chat", "adapters": "Adapters",
               "invocation": "Invocation field", "engine": "Engine screen", "details": "Details of an adapter", "load": "Load screen"}


def bindings(pane: str) -> list[Binding]:
    """The bindings of a pane; ids are `pane.action` and can be remapped."""
    return [Binding(key.keys, key.action, key.label, show=key.footer, key_display=key.display, tooltip=key.help,
                    priority=key.priority or pane in AT_ONCE, id=f"{pane}.{key.action}") for key in KEYS[pane]]


def help_lines(pane: str) -> list[tuple[str, str]]:
    """(keys, what they do) for F1."""
    return [(key.keys.replace(",", " ").replace("escape", "esc"), key.help) for key in KEYS[pane]]
