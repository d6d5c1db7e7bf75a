//! Snapshots as files.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Snapshot, pickle};

/// Formats of snapshot files. Both have the same keys and values; JSON has arrays in place of
/// tuples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileFormat {
    /// A pickle of protocol 2: for `torch.cuda._memory_viz`, PyTorch's memory viewer, and Python's
    /// `pickle.load`.
    Pickle,
    /// JSON: for newer versions of PyTorch's memory viewer, and any other program. Three times as long
    /// as a pickle.
    Json,
}

/// Why a snapshot was not saved. A file that was at the path before is unchanged, and no new file
/// remains.
#[derive(Clone, Debug, thiserror::Error)]
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
    /// program ends early. Saving takes a fixed amount of memory, however long the history is.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::parse("history:100000")?)?;
    /// let buffer = allocator.alloc_bytes(3 << 20, device.default_stream())?;
    /// # let directory = std::env::temp_dir();
    /// let path = directory.join(format!("snapshot-{}.pickle", std::process::id()));
    /// allocator.snapshot().save(&path)?; // for PyTorch's memory viewer, or `python -m torch.cuda._memory_viz stats`
    /// assert!(std::fs::read(&path)?.starts_with(b"\x80\x02}(X\x08\0\0\0segments"));
    /// # std::fs::remove_file(path)?;
    /// # drop(buffer);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A path with another ending, and errors of the system.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), SaveError> {
        let path = path.as_ref();
        let format = FileFormat::of(path)?;
        replace(path, |file| self.write(format, file))
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

/// Replaces the file at `path` by one with the data that `write` gives it, or leaves it as it is.
fn replace(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> Result<(), SaveError> {
    let (temporary, file) =
        create_beside(path).map_err(|cause| SaveError::Create { path: path.to_owned(), cause: cause.into() })?;
    // Network file systems report only then that the disk is full.
    let synced = write(&file).and_then(|()| file.sync_all());
    let written = synced.map_err(|cause| SaveError::Write { path: path.to_owned(), cause: cause.into() });
    // Before the rename, which some systems do not allow for an open file.
    drop(file);
    let rename = || {
        fs::rename(&temporary, path).map_err(|cause| SaveError::Rename { path: path.to_owned(), cause: cause.into() })
    };
    written.and_then(|()| rename()).inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    })
}

/// Creates a new file in the directory of `path`.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static CREATED: AtomicU64 = AtomicU64::new(0);
    loop {
        let (process, number) = (std::process::id(), CREATED.fetch_add(1, Ordering::Relaxed));
        let temporary = path.with_file_name(format!(".aquifer-snapshot-{process}-{number}.tmp"));
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            // From an earlier process with the same number, or from one on another machine.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created.map(|file| (temporary, file)),
        }
    }
}

#[cfg(test)]
mod tests;
