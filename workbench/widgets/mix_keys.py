"""The keys that change a mix on a list of adapters: the chat's, and that of a column of the compare screen."""
from __future__ import annotations

from collections.abc import Callable

from ..mixboard import MixBoard, parse_scale, scale_text
from .adapter_list import AdapterList
from .ask import Ask
from .scale_bar import on_grid


class MixKeys:
    """Beside a Widget class that holds an AdapterList and has a message `Changed`, which is posted after every key."""

    @property
    def mix_board(self) -> MixBoard | None:
        """What the keys act on; None when there is nothing."""
        raise NotImplementedError

    @property
    def asker(self) -> Ask:
        """The field in which a scale is typed."""
        raise NotImplementedError

    @property
    def whose(self) -> str:
        """Whose mix it is, behind the name of an adapter."""
        return ""

    def hint(self, text: str) -> None:
        """To be said in the screen's line, once that is shown."""
        raise NotImplementedError

    @property
    def name_here(self) -> str | None:
        """The adapter under the cursor, if the board has it still."""
        row, board = self.query_one(AdapterList).current, self.mix_board
        return row.name if row and board is not None and row.name in board else None

    def change(self, change: Callable[[MixBoard], object]) -> None:
        if (board := self.mix_board) is not None:
            self.hint("")
            change(board)
            self.post_message(self.Changed())

    def change_here(self, change: Callable[[MixBoard, str], object]) -> None:
        if (name := self.name_here) is not None:
            self.change(lambda board: change(board, name))

    # -- keys -----------------------------------------------------------------------------------
    def action_cursor(self, by: int) -> None:
        self.query_one(AdapterList).move(by)

    def action_toggle(self) -> None:
        self.change_here(lambda board, name: board.toggle(name))

    def action_nudge(self, by: float) -> None:
        self.change_here(lambda board, name: board.set_scale(name, on_grid(board[name].scale + by, 0.01)))

    def action_set_scale(self, scale: float) -> None:
        self.change_here(lambda board, name: board.set_scale(name, float(scale)))

    def action_type_scale(self) -> None:
        name, board = self.name_here, self.mix_board
        if name is None or board is None:
            return

        def take(text: str) -> str | None:
            try:
                scale = parse_scale(text)
            except ValueError as error:
                return str(error)
            if name in board:  # it may have been unloaded since
                board.set_scale(name, scale)
            self.post_message(self.Changed())
            return None

        self.asker.ask(f"scale of {name}{self.whose}", scale_text(board[name].scale), take)

    def action_solo(self) -> None:
        self.change_here(lambda board, name: board.toggle_solo(name))

    def action_bypass(self) -> None:
        self.change(lambda board: board.toggle_bypass())

    def action_undo(self) -> None:
        self.change(lambda board: board.undo() or self.hint("nothing to take back"))

    def action_redo(self) -> None:
        self.change(lambda board: board.redo() or self.hint("nothing to do again"))
