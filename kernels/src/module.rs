//! The modules of device code: PTX text, made from `kernels/cuda` and part of the crate.

/// A module of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Module {
    /// Fills, patterns and checksums: what looks at bytes.
    Bytes,
}

impl Module {
    /// Every module; `ALL[module as usize] == module`.
    pub const ALL: &[Module] = &[Module::Bytes];

    /// The name of its source file, without the ending.
    pub const fn name(self) -> &'static str {
        match self {
            Module::Bytes => "bytes",
        }
    }

    /// Its PTX text.
    pub const fn ptx(self) -> &'static str {
        match self {
            Module::Bytes => include_str!("../ptx/bytes.ptx"),
        }
    }
}
