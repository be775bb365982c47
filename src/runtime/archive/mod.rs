//! Archives of root file systems: read with bounded memory, extracted by a confined child, written.
//!
//! ```text
//!   layer = what changed on a base        complete = everything
//!   base ──links──▶ fresh tree ◀──layer   archive ──▶ fresh tree
//! ```
//! In a layer, a character device 0:0 marks a removed name, as in overlay file systems, and so does a hard link
//! to one; a directory with `OPAQUE` hides what the base has below it.

mod archive_writer;
mod bounds;
mod compose;
mod entries;
mod extract;
mod hardlink_tree;

pub use self::hardlink_tree::hardlink_tree;
pub(super) use compose::{complete, count_entries, layer, pack};
pub use entries::ArchiveLimits;
pub use extract::{Form, NO_SPACE, VERB, extract_into, main};

/// Marks a directory of a layer that hides the base's content.
const OPAQUE: &str = "trusted.overlay.opaque";

/// Whether an attribute is kept; others are meaningful only on the machine they came from.
fn is_kept(attribute: &[u8]) -> bool {
    attribute.starts_with(b"user.") || attribute == b"security.capability"
}
