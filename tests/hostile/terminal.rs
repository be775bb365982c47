//! Text from strangers on an operator's terminal.
