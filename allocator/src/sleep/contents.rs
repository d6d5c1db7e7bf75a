//! Contents of memory that sleeps, in pinned host memory or in a file.
//!
//! Copies to pinned host memory are enqueued one behind the other, and waited for together. Those
//! to and from a file go through two pieces of pinned host memory: while the host writes or reads
//! one, the device copies the other.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_device::HostBuffer;
use aquifer_device::fork::{self, Mutex};
use aquifer_device::internal::MovesContents;
use aquifer_device::{Device, DeviceError, DevicePtr, Stream};

use crate::error::AllocError;
use crate::sleep::options::Contents;

/// Bytes of a piece of pinned host memory on the way to and from a file.
const CHUNK: usize = 8 << 20;

/// Contents of a piece of memory.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    kept: Place,
}

/// Where contents are.
#[derive(Clone, Debug)]
enum Place {
    /// They are zeros.
    Zeros,
    Host(Arc<Mutex<HostBuffer>>, usize),
    File(Arc<SavedFile>, u64),
}

/// A file that goes with its last contents.
#[derive(Debug)]
struct SavedFile {
    file: File,
    path: PathBuf,
}

impl Drop for SavedFile {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "a file of saved contents could not be removed");
        }
    }
}

impl Saved {
    /// The part of the contents that lies in a range, if there is any.
    pub(crate) fn part(&self, range: &Range<u64>) -> Option<Saved> {
        let part = self.addr.max(range.start)..(self.addr + self.bytes).min(range.end);
        if part.is_empty() {
            return None;
        }
        let from = part.start - self.addr;
        let kept = match &self.kept {
            Place::Zeros => Place::Zeros,
            Place::Host(buffer, at) => Place::Host(buffer.clone(), at + size(from)),
            Place::File(file, at) => Place::File(file.clone(), at + from),
        };
        Some(Saved { addr: part.start, bytes: part.end - part.start, kept })
    }
}

/// Copies contents away from the device and back.
pub(crate) struct Mover<'a> {
    device: &'a Device,
    stream: Stream,
    /// The files that contents are saved to, each with its length.
    files: BTreeMap<PathBuf, (Arc<SavedFile>, u64)>,
    /// Pinned host memory that copies use.
    buffers: Vec<Arc<Mutex<HostBuffer>>>,
    /// Pinned host memory of earlier sleeps.
    spare: &'a mut Vec<HostBuffer>,
    /// Chunks for files that the host may use next, the one that came back first at the front,
    chunks: VecDeque<HostBuffer>,
    /// and how many were made. There are two: one is with the device, the other with the host.
    chunks_made: usize,
}

impl<'a> Mover<'a> {
    pub(crate) fn new(device: &'a Device, spare: &'a mut Vec<HostBuffer>) -> Result<Mover<'a>, DeviceError> {
        let (stream, files, buffers) = (device.stream()?, BTreeMap::new(), Vec::new());
        Ok(Mover { device, stream, files, buffers, spare, chunks: VecDeque::new(), chunks_made: 0 })
    }

    /// Saves the contents of pieces of memory. They are saved once [`Mover::finish`] has returned.
    pub(crate) fn save(&mut self, pieces: &[(Range<u64>, Contents)]) -> Result<Vec<Saved>, AllocError> {
        let of_host = pieces.iter().filter(|(_, contents)| *contents == Contents::SaveToHost);
        let bytes: u64 = of_host.map(|(range, _)| range.end - range.start).sum();
        let host = if bytes > 0 { Some(self.host_buffer(bytes)?) } else { None };
        let mut saved = Vec::with_capacity(pieces.len());
        let mut at = 0;
        let _moves = MovesContents::begin();
        for (range, contents) in pieces {
            let (addr, bytes) = (range.start, range.end - range.start);
            let kept = match (contents, &host) {
                (Contents::Zero, _) => Place::Zeros,
                (Contents::SaveToHost, Some(buffer)) => {
                    buffer.lock().download(at, DevicePtr(addr), size(bytes), &self.stream)?;
                    at += size(bytes);
                    Place::Host(buffer.clone(), at - size(bytes))
                }
                (Contents::SaveToFile(path), _) => self.save_to_file(path, range)?,
                _ => continue,
            };
            saved.push(Saved { addr, bytes, kept });
        }
        Ok(saved)
    }

    /// Pinned host memory that keeps contents: some of an earlier sleep, if it is not much larger.
    fn host_buffer(&mut self, bytes: u64) -> Result<Arc<Mutex<HostBuffer>>, AllocError> {
        let fits = |spare: &HostBuffer| (bytes..=2 * bytes).contains(&(spare.size() as u64));
        let spare =
            self.spare.iter().enumerate().filter(|(_, spare)| fits(spare)).min_by_key(|(_, spare)| spare.size());
        let buffer = match spare.map(|(at, _)| at) {
            Some(at) => self.spare.swap_remove(at),
            None => HostBuffer::new(self.device, size(bytes)).map_err(|error| {
                if error.is_out_of_memory() { AllocError::OutOfHostMemory { bytes } } else { error.into() }
            })?,
        };
        let buffer = Arc::new(Mutex::new(buffer));
        self.buffers.push(buffer.clone());
        Ok(buffer)
    }

    fn save_to_file(&mut self, path: &Path, range: &Range<u64>) -> Result<Place, AllocError> {
        let (file, start) = match self.files.get(path) {
            Some((file, length)) => (file.clone(), *length),
            None => {
                let opened = OpenOptions::new().read(true).write(true).create_new(true).open(path);
                let file = opened.map_err(|error| failed("create", path, error))?;
                (Arc::new(SavedFile { file, path: path.to_owned() }), 0)
            }
        };
        self.files.insert(path.to_owned(), (file.clone(), start + range.end - range.start));
        (&file.file).seek(SeekFrom::Start(start)).map_err(|error| failed("write", path, error))?;
        let mut filled: Option<(HostBuffer, usize)> = None;
        for (addr, bytes) in chunks(range) {
            let mut chunk = self.take_chunk()?;
            chunk.download(0, DevicePtr(addr), bytes, &self.stream)?;
            self.write(&file, filled.replace((chunk, bytes)))?;
        }
        self.write(&file, filled)?;
        Ok(Place::File(file, start))
    }

    /// Writes the first bytes of a chunk to a file, once they have arrived from the device.
    fn write(&mut self, file: &SavedFile, filled: Option<(HostBuffer, usize)>) -> Result<(), AllocError> {
        let Some((mut chunk, bytes)) = filled else { return Ok(()) };
        let written = (&file.file).write_all(&chunk.bytes()?[..bytes]);
        self.chunks.push_back(chunk);
        written.map_err(|error| failed("write", &file.path, error))
    }

    /// A chunk that the host may use next.
    fn take_chunk(&mut self) -> Result<HostBuffer, DeviceError> {
        let back = if self.chunks_made < 2 { None } else { self.chunks.pop_front() };
        back.map_or_else(
            || {
                self.chunks_made += 1;
                HostBuffer::new(self.device, CHUNK)
            },
            Ok,
        )
    }

    /// Brings contents back to mapped memory. They are there once [`Mover::finish`] has returned.
    pub(crate) fn restore(&mut self, saved: &Saved) -> Result<(), AllocError> {
        let _moves = MovesContents::begin();
        match &saved.kept {
            Place::Zeros => self.stream.fill(DevicePtr(saved.addr), 0, saved.bytes)?,
            Place::Host(buffer, at) => {
                if self.buffers.last().is_none_or(|last| !Arc::ptr_eq(last, buffer)) {
                    self.buffers.push(buffer.clone());
                }
                buffer.lock().upload(*at, DevicePtr(saved.addr), size(saved.bytes), &self.stream)?;
            }
            Place::File(file, at) => {
                let failed = |error| failed("read", &file.path, error);
                (&file.file).seek(SeekFrom::Start(*at)).map_err(failed)?;
                for (addr, bytes) in chunks(&(saved.addr..saved.addr + saved.bytes)) {
                    let mut chunk = self.take_chunk()?;
                    (&file.file).read_exact(&mut chunk.bytes()?[..bytes]).map_err(failed)?;
                    chunk.upload(0, DevicePtr(addr), bytes, &self.stream)?;
                    self.chunks.push_back(chunk);
                }
            }
        }
        Ok(())
    }

    /// Waits until all copies are done. Returns the pinned host memory that they used.
    pub(crate) fn finish(self) -> Result<Vec<Arc<Mutex<HostBuffer>>>, DeviceError> {
        self.stream.synchronize()?;
        self.buffers.iter().try_for_each(|buffer| buffer.lock().wait())?;
        Ok(self.buffers)
    }
}

/// The pieces of a range that pass through chunks: address and length.
fn chunks(range: &Range<u64>) -> impl Iterator<Item = (u64, usize)> + use<> {
    let end = range.end;
    range.clone().step_by(CHUNK).map(move |addr| (addr, size((end - addr).min(CHUNK as u64))))
}

#[cold]
fn failed(doing: &'static str, path: &Path, error: io::Error) -> AllocError {
    AllocError::SavedFile { doing, path: path.to_owned(), error: Arc::new(error) }
}

/// Bytes of device memory as a length in host memory, which is never larger.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
