//! Rate limits: they slow down guessing, and never the rightful owner.
