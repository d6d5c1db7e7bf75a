//! Files as sources of staged uploads. Several threads read a file at a time, each at its own place,
//! so that storage with a queue stays busy.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::endpoints::HostSource;
use crate::config::PAGE;
use crate::error::TransferError;
use crate::regular_file;

/// A part of a file. `failed` makes the error of a read that failed, or that found the file's end.
#[derive(Debug)]
pub struct FileSource<F> {
    file: Arc<File>,
    offset: u64,
    bytes: u64,
    failed: F,
}

/// A part of the file with this name.
///
/// # Errors
/// A file that is not there, unreadable, not a regular file (a directory, a pipe), or too short.
pub(crate) fn open(path: &Path, offset: u64, bytes: u64) -> Result<impl HostSource + use<>, TransferError> {
    let (opened, path) = (regular_file::open(path), path.display().to_string());
    let failed = |path: &str, cause| TransferError::File { path: path.to_owned(), cause: Arc::new(cause) };
    let too_short = move |path: &str, len| TransferError::FileTooShort { path: path.to_owned(), len, offset, bytes };
    let (file, len) = opened.map_err(|cause| failed(&path, cause))?;
    if offset.checked_add(bytes).is_none_or(|end| end > len) {
        return Err(too_short(&path, len));
    }
    let file = Arc::new(file);
    Ok(FileSource::new(file.clone(), offset, bytes, move |cause| match file.metadata() {
        // It was cut short after it was opened.
        Ok(metadata) if cause.kind() == io::ErrorKind::UnexpectedEof => too_short(&path, metadata.len()),
        _ => failed(&path, cause),
    }))
}

impl<F: Fn(io::Error) -> TransferError + Send + Sync> FileSource<F> {
    /// `bytes` bytes of a file, from `offset` on.
    pub fn new(file: Arc<File>, offset: u64, bytes: u64, failed: F) -> FileSource<F> {
        FileSource { file, offset, bytes, failed }
    }
}

impl<F: Fn(io::Error) -> TransferError + Send + Sync> HostSource for FileSource<F> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        regular_file::read_at(&self.file, into, self.offset + offset).map_err(&self.failed)
    }

    fn phase(&self) -> u64 {
        self.offset % PAGE as u64
    }

    fn is_storage(&self) -> bool {
        true
    }
}
