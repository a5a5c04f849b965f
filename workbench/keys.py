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


_SCALES = (
    Key("left,h", "nudge(-0.05)", "Scale", "Scale down by 0.05", footer=True, display="←→"),
    Key("right,l", "nudge(0.05)", "+0.05", "Scale up by 0.05"),
    Key("shift+left,H", "nudge(-0.5)", "-0.5", "Scale down by 0.5"),
    Key("shift+right,L", "nudge(0.5)", "+0.5", "Scale up by 0.5"),
    Key("ctrl+left", "nudge(-0.01)", "-0.01", "Scale down by 0.01"),
    Key("ctrl+right", "nudge(0.01)", "+0.01", "Scale up by 0.01"),
    Key("enter,=", "type_scale", "Value", "Type an exact scale", footer=True, display="⏎"),
    Key("0", "set_scale(0)", "Scale 0", "Set the scale to 0: loaded, but without effect"),
    Key("1", "set_scale(1)", "Scale 1", "Set the scale to 1: as trained"),
)
_UNDO_AND_CURSOR = (
    Key("u", "undo", "Undo", "Take back the last change of the mix"),
    Key("U", "redo", "Redo", "Do again what was taken back"),
    Key("up,k", "cursor(-1)", "Up", "The adapter above"),
    Key("down,j", "cursor(1)", "Down", "The adapter below"),
)
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
        Key("f3", "compare", "Compare", "One prompt to two to four mixes side by side, as rows of one batch; Esc comes back", footer=True),
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
        *_SCALES,
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
        *_UNDO_AND_CURSOR,
    ),
    "invocation": (
        Key("ctrl+t", "in_reply", "In replies", "Let the adapter also act where the model itself writes the invocation", footer=True),
    ),
    "engine": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape,f4", "back", "Back", "Back to the chat", footer=True),
        Key("t", "trace", "Trace", "Record the next step with torch's profiler: its time by kernel, on a CPU by op", footer=True),
        Key("T", "last_trace", "Last trace", "Show the trace that was made last"),
        Key("c", "clear_cache", "Clear cache", "Forget the KV blocks that no running reply holds", footer=True),
    ),
    "trace": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape,f4", "back", "Back", "Back to the engine's panels", footer=True),
        Key("t", "again", "Again", "Trace the next step too; replies stand still while it is read", footer=True),
    ),
    "details": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape", "stop", "Stop", "Stop the check; what was found before stays", footer=True),
        Key("escape", "leave", "Back", "Back to the chat, when nothing is to be stopped", footer=True),
        Key("i", "back", "Back", "Back to the chat, and a check goes on"),
        Key("f5", "effect", "Effect run", "Compare the base's words with and without the adapter, over a few prompts", footer=True),
        Key("p", "insert_prefix", "Prefix to prompt", "Put the prompt prefix that the adapter expects into the prompt", footer=True),
        Key("s", "system_prefix", "Prefix as system", "Make the prompt prefix that the adapter expects the system message", footer=True),
    ),
    "compare": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape", "stop", "Stop", "Stop the replies, or the figures of them; what was said is kept", footer=True, priority=True),
        Key("escape", "close_view", "Columns", "Back from the mix or the tokens to the columns", footer=True, priority=True),
        Key("escape", "back", "Back", "Back to the chat; columns and replies stay", footer=True, priority=True),
        Key("f3", "leave", "Chat", "Back to the chat; replies and figures go on"),
        Key("tab", "pane(1)", "Next pane", "From the prompt to the columns one after the other, and to the prompt", priority=True),
        Key("shift+tab", "pane(-1)", "Previous pane", "The other way round", priority=True),
        Key("ctrl+r", "again", "Again", "Ask the same again, with the mixes set now; a sampled one with the next seed", footer=True),
    ),
    "columns": (
        Key("m,enter", "want('mix')", "Mix", "Set the mix of this column", footer=True, display="m"),
        Key("n", "difference(1)", "Difference", "To the next place where the first text and this one differ", footer=True, display="n"),
        Key("N", "difference(-1)", "Difference before", "To the place before where they differ"),
        Key("k", "want('tokens')", "Tokens", "Every token under two mixes: KL, likeliest tokens, which adapter moved it", footer=True),
        Key("b", "blind", "Blind", "Hide whose replies the next ones are, and vote", footer=True),
        Key("b", "names", "Names", "Show whose replies these and the next ones are, without a vote", footer=True),
        Key("1", "vote(1)", "Left", "Blind vote: the left reply is better", footer=True),
        Key("2", "vote(2)", "Right", "Blind vote: the right reply is better", footer=True),
        Key("3", "vote(3)", "Tie", "Blind vote: both are as good", footer=True),
        Key("4", "vote(4)", "Both bad", "Blind vote: neither will do", footer=True),
        Key("w", "want('sweep')", "Sweep", "One adapter of this column at many scales, as rows of one batch", footer=True),
        Key("W", "want('last sweep')", "Last sweep", "Show the sweep that was made last"),
        Key("e", "want('export')", "Export", "Write the comparison as Markdown and as JSON lines into the current folder", footer=True),
        Key("a", "want('add')", "Add", "Another column, with this one's mix to begin from", footer=True),
        Key("x", "want('remove')", "Remove", "Take this column away"),
        Key("c", "want('chat')", "Chat's mix", "Give this column the mix that the chat has now"),
        Key("y", "lock", "Link", "Scroll the columns together, or each by itself"),
        Key("g", "toggle_sampling", "Greedy/sample", "Switch between greedy decoding and sampling at temperature 0.7"),
        Key("h", "want('history')", "After the chat", "Put the prompt behind the chat as it stands, or let it stand alone"),
        Key("v", "want('invocation')", "Invocation", "End the prompt with the invocation of this column's aLoRA, or as usual"),
        Key("left", "side(-1)", "Left", "The column to the left"),
        Key("right", "side(1)", "Right", "The column to the right"),
        Key("up", "scroll(-1)", "Up", "Scroll up"),
        Key("down,j", "scroll(1)", "Down", "Scroll down"),
        Key("pageup", "scroll(-10)", "Page up", "Scroll a page up"),
        Key("pagedown", "scroll(10)", "Page down", "Scroll a page down"),
        Key("home", "scroll(-1000)", "Top", "Scroll to the beginning"),
        Key("end", "scroll(1000)", "End", "Scroll to the end"),
    ),
    "mix": (
        Key("space", "toggle", "On/off", "Switch the adapter on or off in this column", footer=True),
        *_SCALES,
        Key("s", "solo", "Solo", "This adapter alone; again to end it", footer=True),
        Key("m", "bypass", "Base", "The base alone; again to end it", footer=True),
        Key("c", "chat", "Chat's mix", "The mix that the chat has now", footer=True),
        *_UNDO_AND_CURSOR,
    ),
    "tokens": (
        Key("left,h", "move(-1)", "Token", "The token before", footer=True, display="←→"),
        Key("right,l", "move(1)", "Next token", "The token after"),
        Key("up", "line(-1)", "Up", "The token above"),
        Key("down,j", "line(1)", "Down", "The token below"),
        Key("home", "move(-100000)", "First", "The first token"),
        Key("end", "move(100000)", "Last", "The last token"),
        Key("n", "apart(1)", "Far apart", "To the next token before which the mixes are apart", footer=True),
        Key("N", "apart(-1)", "Far apart before", "To the token before"),
        Key("o", "other", "Other column", "Look at another column beside the first", footer=True),
        Key("k", "close", "Columns", "Back to the columns"),
    ),
    "sweep": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape", "stop", "Stop", "Stop the replies, or the figures of them; what was said is kept", footer=True, priority=True),
        Key("escape", "back", "Back", "Back to the comparison", footer=True, priority=True),
        Key("W", "leave", "Compare", "Back to the comparison; replies and figures go on"),
        Key("up", "scale(-1)", "Scale", "The scale below", footer=True, display="↑↓"),
        Key("down,j", "scale(1)", "Next scale", "The scale above"),
        Key("pageup", "scroll(-1)", "Page up", "Scroll the reply up"),
        Key("pagedown", "scroll(1)", "Page down", "Scroll the reply down"),
        Key("e", "export", "Export", "Write the sweep as Markdown and as JSON lines into the current folder", footer=True),
    ),
    "load": (
        Key("f1", "app.help", "Help", "What the keys and the words of this screen mean", footer=True),
        Key("escape", "back", "Stop, back", "Stop the load; when nothing loads, go back", footer=True),
        Key("down", "list", "List", "From the path to the list of models"),
        Key("f5", "rescan", "Look again", "Look for models on this machine again", footer=True),
    ),
}
AT_ONCE = ("adapters", "mix", "columns")
"""panes whose keys are carried out before the next key is looked at: it may be typed into a field that they open"""
PANE_TITLES = {"app": "Anywhere", "bench": "Main screen", "prompt": "Prompt", "reply": "Chat", "adapters": "Adapters",
               "invocation": "Invocation field", "engine": "Engine screen", "trace": "Trace of a step",
               "details": "Details of an adapter", "load": "Load screen",
               "compare": "Compare screen", "columns": "Columns of a comparison", "mix": "Mix of a column",
               "tokens": "Tokens of a comparison", "sweep": "Sweep of a scale"}


def bindings(pane: str) -> list[Binding]:
    """The bindings of a pane; ids are `pane.action` and can be remapped."""
    return [Binding(key.keys, key.action, key.label, show=key.footer, key_display=key.display, tooltip=key.help,
                    priority=key.priority or pane in AT_ONCE, id=f"{pane}.{key.action}") for key in KEYS[pane]]


def help_lines(pane: str) -> list[tuple[str, str]]:
    """(keys, what they do) for F1."""
    return [(key.keys.replace(",", " ").replace("escape", "esc"), key.help) for key in KEYS[pane]]
