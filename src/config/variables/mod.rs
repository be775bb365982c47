//! The table of every variable that the server reads, and the only place that spells their names.
//! `baton config`, the flags of `baton serve` and `docs/configuration.md` are generated from it.

use super::variable::{Preset, Section, ValueKind, Variable};

/// Declares the variables of one section as constants, and the section.
macro_rules! section {
    ($section:ident, $title:literal, $($name:ident = ($variable:literal, $kind:ident, $preset:expr, $meaning:literal $(,)?);)*) => {
        $(pub const $name: Variable =
            Variable { name: $variable, kind: ValueKind::$kind, preset: $preset, meaning: $meaning };)*
        pub(super) const $section: Section = Section { title: $title, variables: &[$($name),*] };
    };
}

mod client_variables;
mod instance_variables;
mod network_variables;
mod storage_variables;

pub use client_variables::*;
pub use instance_variables::*;
pub use network_variables::*;
pub use storage_variables::*;

pub const SECTIONS: &[Section] = &[ACCESS, CONNECTIONS, SANDBOXES, NETWORK, MACHINE, STORAGE, LEASE];

pub fn find(name: &str) -> Option<&'static Variable> {
    all().find(|variable| variable.name == name)
}

pub fn all() -> impl Iterator<Item = &'static Variable> {
    SECTIONS.iter().flat_map(|section| section.variables)
}
