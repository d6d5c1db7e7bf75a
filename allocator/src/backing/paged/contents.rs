//! What happens to the contents of memory that sleeps.

use std::path::PathBuf;

/// Fate of the contents of memory while it sleeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Contents {
    /// The contents are lost: after [`crate::Allocator::wake`] the memory is uninitialised.
    Discard,
    /// The contents are lost, and all bytes are 0 after waking up.
    Zero,
    /// The contents of live memory are kept in pinned host memory, and restored from there.
    SaveToHost,
    /// The contents of live memory are kept in a file, and restored from there. The file must not
    /// exist before, and no other program may change it. It is removed once the contents are back,
    /// or with the allocator. Errors of the file are [`crate::AllocError::SavedFile`]; copies go
    /// through 16 MiB of pinned host memory.
    SaveToFile(PathBuf),
}
