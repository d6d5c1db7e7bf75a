//! Snapshots as files.

use std::io::{self, BufWriter, Write};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Snapshot, pickle};
use crate::replace_file::{Step, replace_file};

/// Formats of snapshot files. Both have the same keys and values; JSON has arrays in place of
/// tuples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileFormat {
    /// A pickle of protocol 2: for `torch.cuda._memory_viz`, PyTorch's memory viewer, and Python's
    /// `pickle.load`.
    Pickle,
    /// JSON: for newer versions of PyTorch's memory viewer, and any other program. Three times as
    /// long as a pickle.
    Json,
}

/// Why a snapshot was not saved. A file that was at the path before is unchanged, and no new file
/// remains.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The caller gave a path whose ending names no format. Nothing was written.
    #[error("cannot save a snapshot as {}: the name must end in .pickle, .pkl or .json", path.display())]
    UnknownEnding {
        /// The path.
        path: PathBuf,
    },
    /// The system did not create a file in the path's directory: mostly because the directory is
    /// missing, or the program may not write to it.
    #[error("cannot save a snapshot as {}: no file can be created in its directory: {cause}", path.display())]
    Create {
        /// The path.
        path: PathBuf,
        /// The system's error.
        cause: Arc<io::Error>,
    },
    /// The system did not take all of the data: mostly because the disk is full.
    #[error("cannot save a snapshot as {}: its data cannot be written: {cause}", path.display())]
    Write {
        /// The path.
        path: PathBuf,
        /// The system's error.
        cause: Arc<io::Error>,
    },
    /// The system did not give the complete file its name: mostly because a directory has that
    /// name.
    #[error("cannot save a snapshot as {}: the file cannot get this name: {cause}", path.display())]
    Rename {
        /// The path.
        path: PathBuf,
        /// The system's error.
        cause: Arc<io::Error>,
    },
}

aquifer_device::debug_as_display!(SaveError);

// A cause is only read.
impl UnwindSafe for SaveError {}
impl RefUnwindSafe for SaveError {}

impl FileFormat {
    /// The format that the ending of a path names: `.pickle` or `.pkl`, or `.json`, in upper or
    /// lower case.
    ///
    /// # Errors
    /// [`SaveError::UnknownEnding`].
    pub fn of(path: &Path) -> Result<FileFormat, SaveError> {
        let ends_in = |ending: &str| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(ending));
        if ends_in("pickle") || ends_in("pkl") {
            Ok(FileFormat::Pickle)
        } else if ends_in("json") {
            Ok(FileFormat::Json)
        } else {
            Err(SaveError::UnknownEnding { path: path.to_owned() })
        }
    }
}

impl Snapshot {
    /// Saves the snapshot as a file, in the format that the path's ending names: `.pickle` or
    /// `.pkl`, or `.json`. A file of that name is replaced.
    ///
    /// The data goes to a temporary file in the same directory, which is renamed when it is
    /// complete. So the file at the path is complete at any time, even if the disk is full or the
    /// program ends early. A symbolic link stays, and its target is replaced. A pipe or a device is
    /// written directly. Saving takes a fixed amount of memory, however long the history is.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::new(&device, "history:100000")?;
    /// let buffer = memory.alloc_bytes(3 << 20, device.default_stream())?;
    /// # let directory = std::env::temp_dir();
    /// let path = directory.join(format!("snapshot-{}.pickle", std::process::id()));
    /// memory.snapshot().save(&path)?; // for PyTorch's memory viewer, or `python -m torch.cuda._memory_viz stats`
    /// assert!(std::fs::read(&path).unwrap().starts_with(b"\x80\x02}(X\x08\0\0\0segments"));
    /// # std::fs::remove_file(path).unwrap();
    /// # drop(buffer);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// A path with another ending, and errors of the system.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), SaveError> {
        let path = path.as_ref();
        let format = FileFormat::of(path)?;
        let failed = |step, cause: io::Error| {
            let (path, cause) = (path.to_owned(), cause.into());
            match step {
                Step::Create => SaveError::Create { path, cause },
                Step::Write => SaveError::Write { path, cause },
                Step::Rename => SaveError::Rename { path, cause },
            }
        };
        replace_file(path, failed, |file| self.write(format, file).map_err(|cause| failed(Step::Write, cause)))
    }

    /// Writes the snapshot to anything that takes bytes. Writes are large, so `out` needs no
    /// buffer.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, format: FileFormat, out: impl Write) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
        match format {
            FileFormat::Pickle => pickle::write(self, &mut out)?,
            FileFormat::Json => serde_json::to_writer(&mut out, self)?,
        }
        out.flush()
    }
}

const BUFFER_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
