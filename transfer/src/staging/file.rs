//! Files as sources of staged uploads.
//!
//! Several threads read a file at a time, each at its own place, so that storage with a queue stays
//! busy. Whether reading past the system's cache is faster depends on the storage and the contents
//! of the cache, so it is measured while the file is read.
//!
//! `O_DIRECT` (open(2) of Linux) needs offset, length and address at multiples of the storage's
//! block size; this uses pages. The rest, and reads that the file system refuses, go through the
//! cache.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer_device::fork::Mutex;

use super::config::{DirectIo, PAGE};
use super::endpoints::HostSource;
use crate::counters::nanoseconds;
use crate::error::TransferError;
use crate::regular_file;

/// Statistics of an upload of a file. Times are of the host's clock, on virtual devices too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileReport {
    /// Bytes that were read.
    pub bytes: u64,
    /// Bytes of these that were read past the system's cache of files.
    pub direct_bytes: u64,
    /// From the call to the end of the last read.
    pub elapsed: Duration,
    /// Time in reads, added up over threads.
    pub time_reading: Duration,
}

/// A part of a file.
#[derive(Debug)]
pub(crate) struct FileSource {
    path: String,
    file: File,
    direct: Option<Direct>,
    offset: u64,
    bytes: u64,
    begun: Instant,
    /// Outlives the source.
    report: Arc<Mutex<FileReport>>,
}

impl FileSource {
    /// `bytes` bytes of a file, from `offset` on.
    ///
    /// # Errors
    /// A file that is not there, unreadable, not a regular file (a directory, a pipe), or too
    /// short.
    pub(crate) fn open(path: &Path, offset: u64, bytes: u64, direct: DirectIo) -> Result<FileSource, TransferError> {
        let name = path.display().to_string();
        let failed = |cause: io::Error| TransferError::File { path: name.clone(), cause: Arc::new(cause) };
        let (file, len) = regular_file::open(path).map_err(failed)?;
        if offset.checked_add(bytes).is_none_or(|end| end > len) {
            return Err(TransferError::FileTooShort { path: name, len, offset, bytes });
        }
        let (begun, direct) = (Instant::now(), Direct::open(&file, bytes, direct));
        let report = Arc::new(Mutex::new(FileReport { bytes, ..FileReport::default() }));
        Ok(FileSource { path: name, file, direct, offset, bytes, begun, report })
    }

    pub(crate) fn report(&self) -> &Arc<Mutex<FileReport>> {
        &self.report
    }

    /// Reads the aligned part past the cache, and returns its length.
    fn read_direct(&self, offset: u64, into: &mut [u8]) -> usize {
        let Some(direct) = self.direct.as_ref().filter(|direct| direct.is_next()) else { return 0 };
        let aligned = offset.is_multiple_of(PAGE as u64) && into.as_ptr().addr().is_multiple_of(PAGE);
        let whole = if aligned { into.len() / PAGE * PAGE } else { 0 };
        let (read, refused) = regular_file::read_at(&direct.file, &mut into[..whole], offset);
        if let Some(error) = refused {
            // The read through the cache finds out whether the file is at fault.
            tracing::debug!(path = self.path, %error, "reading past the cache of files failed");
            direct.refused.store(true, Ordering::Relaxed);
        }
        self.report.lock().direct_bytes += read as u64;
        read
    }

    /// The error of a failed read: a file that ends too early was cut short after it was opened.
    fn refusal(&self, error: io::Error) -> TransferError {
        let path = self.path.clone();
        match self.file.metadata() {
            Ok(metadata) if error.kind() == io::ErrorKind::UnexpectedEof => {
                TransferError::FileTooShort { path, len: metadata.len(), offset: self.offset, bytes: self.bytes }
            }
            _ => TransferError::File { path, cause: Arc::new(error) },
        }
    }
}

impl HostSource for FileSource {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let start = Instant::now();
        let offset = self.offset + offset;
        let direct = self.read_direct(offset, into);
        let (_, refused) = regular_file::read_at(&self.file, &mut into[direct..], offset + direct as u64);
        let time = start.elapsed();
        let mut report = self.report.lock();
        report.time_reading += time;
        report.elapsed = report.elapsed.max(self.begun.elapsed());
        drop(report);
        if let Some(speeds) = &self.direct {
            speeds.note(direct > 0, into.len() as u64, nanoseconds(time));
        }
        match refused {
            None => Ok(()),
            Some(error) => Err(self.refusal(error)),
        }
    }

    fn phase(&self) -> u64 {
        self.offset % PAGE as u64
    }

    fn is_storage(&self) -> bool {
        true
    }
}

/// A file opened past the cache, and the speeds of both ways to read it.
#[derive(Debug)]
struct Direct {
    file: File,
    /// Whether both ways are compared.
    measured: bool,
    refused: AtomicBool,
    reads: AtomicU64,
    /// Bytes and ns of reads through the cache, and of those past it.
    speeds: [(AtomicU64, AtomicU64); 2],
}

/// The first reads, which alternate between the two ways.
const MEASURED_READS: u64 = 8;

/// The shortest part of a file that is worth measuring, in bytes.
const MEASURED_BYTES: u64 = 64 << 20;

impl Direct {
    fn open(file: &File, bytes: u64, wanted: DirectIo) -> Option<Direct> {
        let measured = match wanted {
            DirectIo::Never => return None,
            DirectIo::Always => false,
            DirectIo::Measured if bytes < MEASURED_BYTES => return None,
            DirectIo::Measured => true,
        };
        let file = open_direct(file).ok()?;
        Some(Direct {
            file,
            measured,
            refused: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            speeds: Default::default(),
        })
    }

    /// Whether the next read should go past the cache.
    fn is_next(&self) -> bool {
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        if self.refused.load(Ordering::Relaxed) {
            return false;
        }
        if !self.measured {
            return true;
        }
        if number < MEASURED_READS {
            return !number.is_multiple_of(2);
        }
        let [cached, direct] = self
            .speeds
            .each_ref()
            .map(|(bytes, ns)| bytes.load(Ordering::Relaxed) as f64 / ns.load(Ordering::Relaxed).max(1) as f64);
        direct > cached
    }

    fn note(&self, direct: bool, bytes: u64, ns: u64) {
        let (all_bytes, all_ns) = &self.speeds[usize::from(direct)];
        all_bytes.fetch_add(bytes, Ordering::Relaxed);
        all_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

/// Opens a file once more, to read past the cache.
#[cfg(target_os = "linux")]
fn open_direct(file: &File) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    // The open file itself: another may have its name by now.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_file: &File) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direct(measured: bool) -> Direct {
        Direct {
            file: File::open(std::env::current_exe().unwrap()).unwrap(),
            measured,
            refused: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            speeds: Default::default(),
        }
    }

    #[test]
    fn both_ways_are_tried_alternately_and_the_faster_one_is_used() {
        for direct_ns in [500, 2000] {
            let ways = direct(true);
            for number in 0..MEASURED_READS {
                let past = ways.is_next();
                assert_eq!(past, number % 2 == 1);
                ways.note(past, 1000, if past { direct_ns } else { 1000 });
            }
            assert_eq!([ways.is_next(), ways.is_next()], [direct_ns < 1000; 2]);
            ways.refused.store(true, Ordering::Relaxed);
            assert!(!ways.is_next());
        }
        let always = direct(false);
        assert!(always.is_next() && always.is_next());
    }

    #[test]
    fn unaligned_ends_are_read_through_the_cache() {
        let path = std::env::current_exe().unwrap();
        let whole = std::fs::read(&path).unwrap();
        let source = FileSource::open(&path, 0, whole.len() as u64, DirectIo::Always).unwrap();
        let mut memory = vec![0; 4 * PAGE + 100];
        for (skew, offset) in [(0, 0), (0, PAGE), (1, PAGE), (0, 17), (0, whole.len() - memory.len())] {
            memory.fill(0);
            let start = memory.as_ptr().addr().next_multiple_of(PAGE) - memory.as_ptr().addr() + skew;
            let into = &mut memory[start..start + 2 * PAGE + 50];
            source.read(offset as u64, into).unwrap();
            assert!(into == &whole[offset..offset + into.len()], "{skew} {offset}");
        }
        assert!(source.report().lock().direct_bytes <= 4 * PAGE as u64);
        assert!(source.read(whole.len() as u64, &mut memory).unwrap_err().to_string().contains("beyond its end"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_file_that_was_replaced_is_not_mixed_with_what_has_its_name() {
        use std::os::unix::fs::FileExt;
        let name = format!("aquifer-replaced-{}", std::process::id());
        // Not in a temporary folder, which may lie in memory, where nothing is read past a cache.
        let path = std::env::current_exe().unwrap().with_file_name(name);
        std::fs::write(&path, [1; 8192]).unwrap();
        let file = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, [2; 8192]).unwrap();
        let direct = Direct::open(&file, 8192, DirectIo::Always);
        std::fs::remove_file(&path).unwrap();
        let Some(direct) = direct else { return eprintln!("SKIPPED: no file can be read past the cache here") };
        let mut aligned = vec![0; 4096 + 8192];
        let start = aligned.as_ptr().align_offset(4096);
        if direct.file.read_exact_at(&mut aligned[start..start + 4096], 0).is_ok() {
            assert_eq!(aligned[start..start + 4096], [1; 4096]);
        }
    }
}
