//! Uploads of files.

use std::io::ErrorKind;
use std::time::Duration;

use aquifer::transfer::{FilePart, TransferError};
use aquifer::{Buffer, Error};

use super::{content, runtime, small};

/// A file that is removed when this is dropped.
struct TempFile(std::path::PathBuf);

impl TempFile {
    fn new(name: &str, content: &[u8]) -> TempFile {
        let path = std::env::temp_dir().join(format!("aquifer-staging-{name}-{}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        TempFile(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn files_arrive_intact_from_any_offset() {
    let content = content(700_000, 4);
    let file = TempFile::new("offsets", &content);
    let (sim, transfer) = runtime(small());
    let stream = transfer.device().stream().unwrap();
    for (offset, len) in [(0, 700_000), (4096, 65_536), (4095, 300_001), (699_999, 1), (10, 4096), (700_000, 0)] {
        let mut buffer: Buffer<u8> = transfer.allocator().alloc(usize::try_from(len as u64).unwrap(), &stream).unwrap();
        buffer.upload(FilePart::new(&file.0).offset(offset as u64), &transfer).unwrap().wait().unwrap();
        let bytes = buffer.to_vec(&transfer).unwrap();
        assert!(bytes == content[offset..offset + len], "{len} bytes from {offset}");
    }
    assert!(transfer.staging_stats().time_reading > Duration::ZERO);
    assert!(sim.violations().is_empty());
}

#[test]
fn errors_of_files_are_returned_at_the_call() {
    let file = TempFile::new("wrong", &[7; 100]);
    let (_, transfer) = runtime(small());
    let stream = transfer.device().stream().unwrap();
    let mut buffer: Buffer<u8> = transfer.allocator().alloc(50, &stream).unwrap();
    let kind = |result: Result<_, Error>| match result.map(drop) {
        Err(Error::Transfer(TransferError::File { cause, path })) => {
            assert!(!path.is_empty());
            cause.kind()
        }
        other => panic!("{other:?}"),
    };
    let missing = file.0.with_extension("missing");
    assert_eq!(kind(buffer.upload(FilePart::new(&missing), &transfer)), ErrorKind::NotFound);
    let directory = std::env::temp_dir();
    assert_eq!(kind(buffer.upload(FilePart::new(directory), &transfer)), ErrorKind::IsADirectory);
    for offset in [51, 100, 101, u64::MAX] {
        let error = buffer.upload(FilePart::new(&file.0).offset(offset), &transfer).map(drop).unwrap_err();
        assert!(matches!(error, Error::Transfer(TransferError::FileTooShort { len: 100, bytes: 50, .. })), "{error}");
    }
    buffer.upload(FilePart::new(&file.0).offset(50), &transfer).unwrap().wait().unwrap();
}
