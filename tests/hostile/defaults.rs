//! What an operator gets who sets nothing.
