//! Uploads of files.

use std::io::ErrorKind;
use std::time::Duration;

use aquifer::transfer::{DirectIo, FilePart, TransferError};
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
fn files_arrive_intact_from_any_offset_through_the_cache_and_past_it() {
    let content = content(700_000, 4);
    let file = TempFile::new("offsets", &content);
    for direct in [DirectIo::Never, DirectIo::Always, DirectIo::Measured] {
        let (sim, transfer) = runtime(small().direct_io(direct));
        let stream = transfer.device().stream().unwrap();
        for (offset, len) in [(0, 700_000), (4096, 65_536), (4095, 300_001), (699_999, 1), (10, 4096), (700_000, 0)] {
            let mut buffer: Buffer<u8> =
                transfer.allocator().alloc(usize::try_from(len as u64).unwrap(), &stream).unwrap();
            let pending = transfer.upload(FilePart::new(&file.0).offset(offset as u64), &mut buffer).unwrap();
            let report = pending.wait().unwrap();
            assert_eq!(report.bytes, len as u64);
            assert!(report.direct_bytes <= report.bytes, "{report:?}");
            assert!(direct == DirectIo::Always || report.direct_bytes == 0, "{report:?}");
            let bytes = transfer.to_vec(&buffer).unwrap().wait().unwrap();
            assert!(bytes == content[offset..offset + len], "{direct:?}: {len} bytes from {offset}");
        }
        assert!(transfer.staging_stats().time_reading > Duration::ZERO);
        assert!(sim.violations().is_empty());
    }
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
    assert_eq!(kind(transfer.upload(FilePart::new(&missing), &mut buffer)), ErrorKind::NotFound);
    let directory = std::env::temp_dir();
    assert_eq!(kind(transfer.upload(FilePart::new(directory), &mut buffer)), ErrorKind::IsADirectory);
    for offset in [51, 100, 101, u64::MAX] {
        let error = transfer.upload(FilePart::new(&file.0).offset(offset), &mut buffer).map(drop).unwrap_err();
        assert!(matches!(error, Error::Transfer(TransferError::FileTooShort { len: 100, bytes: 50, .. })), "{error}");
    }
    transfer.upload(FilePart::new(&file.0).offset(50), &mut buffer).unwrap().wait().unwrap();
    let rest = transfer.to_device::<u8, _>(FilePart::new(&file.0).offset(40), &stream).unwrap().wait().unwrap();
    assert_eq!(rest.len(), 60, "all that the file has from there");
    assert!(matches!(
        transfer.to_device::<u8, _>(FilePart::new(&missing), &stream).map(drop),
        Err(Error::Transfer(TransferError::File { .. }))
    ));
}
