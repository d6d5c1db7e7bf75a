//! Steps with copies: of each kind, between device memory, pinned memory, ordinary memory and
//! borrowed memory.

use aquifer::Error;
use aquifer::transfer::Direction;
use aquifer::transfer::{Owner, Region};
use aquifer_tests::random::pattern;

use super::interpreter::{Begun, Interpreter, pick};
use super::op::LENGTHS;
use super::{to_device, to_pinned, to_vec};

/// Something that lends no slice, but panics.
struct Panicking(usize);

impl AsRef<[u8]> for Panicking {
    fn as_ref(&self) -> &[u8] {
        // The calling thread may look at it; threads of the runtime have names.
        match std::thread::current().name() {
            Some(name) if name.starts_with("aquifer") => panic!("the source panics"),
            _ => &[7; 300_000][..self.0],
        }
    }
}

impl Interpreter {
    /// A new buffer of device memory.
    pub(super) fn new_device(&mut self, length: usize) {
        let (allocator, stream) = (self.bench.transfer.allocator(), &self.streams[0]);
        let zeroed = allocator.alloc_bytes_zeroed(LENGTHS[length] as u64, stream).map_err(Error::from);
        let buffer = zeroed.and_then(|zeroed| allocator.buffer_of(zeroed, stream));
        if let Some(buffer) = self.done(buffer) {
            self.devices.push((buffer, Some(vec![0; LENGTHS[length]])));
        }
    }

    /// A new buffer of pinned memory.
    pub(super) fn new_pinned(&mut self, length: usize, seed: u64) {
        let bytes = pattern(seed, LENGTHS[length]);
        if let Some(buffer) = self.done(self.bench.transfer.pinned().alloc_from(&bytes)) {
            self.pinned.push((buffer, Some(bytes)));
        }
    }

    /// The host writes pinned memory.
    pub(super) fn write(&mut self, index: usize, seed: u64) {
        let Some(index) = pick(&self.pinned, index) else { return };
        let (buffer, content) = &mut self.pinned[index];
        let bytes = pattern(seed, buffer.len());
        let written = buffer.write().map(|mut memory| memory.copy_from_slice(&bytes));
        *content = if written.is_ok() { Some(bytes) } else { content.take() };
        self.done(written);
    }

    /// The host reads pinned memory.
    pub(super) fn read(&mut self, index: usize) {
        let Some(index) = pick(&self.pinned, index) else { return };
        let (buffer, content) = &self.pinned[index];
        if let (Some(bytes), Some(content)) = (self.done(buffer.read()), content) {
            assert!(bytes == *content, "pinned memory {index} differs");
        }
    }

    /// From pinned memory to the device.
    pub(super) fn upload(&mut self, pinned: usize, device: usize, on: Option<usize>) {
        let Some((device, pinned)) = self.pair(device, pinned) else { return };
        let transfer = self.on(on);
        let ((buffer, content), (source, bytes)) = (&mut self.devices[device], &self.pinned[pinned]);
        let begun = buffer.upload(source, &transfer);
        *content = begun.is_ok().then(|| bytes.clone()).flatten();
        note(&mut self.uploaded, begun.is_ok(), buffer.len() as u64);
        self.begin(begun.map(Begun::Nothing));
    }

    /// From the device to pinned memory.
    pub(super) fn download(&mut self, device: usize, pinned: usize, on: Option<usize>) {
        let Some((device, pinned)) = self.pair(device, pinned) else { return };
        let transfer = self.on(on);
        let ((buffer, bytes), (target, content)) = (&self.devices[device], &mut self.pinned[pinned]);
        let begun = buffer.download(target, &transfer);
        *content = begun.is_ok().then(|| bytes.clone()).flatten();
        self.begin(begun.map(Begun::Nothing));
    }

    /// From buffer to buffer on the device.
    pub(super) fn copy(&mut self, from: usize, to: usize) {
        let (Some(from), Some(to)) = (pick(&self.devices, from), pick(&self.devices, to)) else { return };
        let (source, bytes) = (self.devices[from].0.share(), self.devices[from].1.clone());
        let (target, content) = &mut self.devices[to];
        if from == to || source.len() != target.len() {
            return;
        }
        let begun = self.bench.transfer.copy(&source, target);
        *content = begun.is_ok().then_some(bytes).flatten();
        self.begin(begun.map(|begun| Begun::Nothing(begun.map(drop))));
    }

    /// Between pinned memory: all of it, or rows of one with gaps to rows without.
    pub(super) fn copy_on_host(&mut self, from: usize, to: usize, width: Option<usize>) {
        let (Some(from), Some(to)) = (pick(&self.pinned, from), pick(&self.pinned, to)) else { return };
        if from == to || self.pinned[from].0.len() != self.pinned[to].0.len() {
            return;
        }
        let (mut target, content) = self.pinned.swap_remove(to);
        let (source, bytes) = &self.pinned[if from == self.pinned.len() { to } else { from }];
        let len = source.len();
        let copied = source.read().and_then(|from| {
            let mut to = target.write()?;
            let (width, pitch) = width.map_or((len, len), |width| (width, 2 * width));
            let rows = from.chunks_exact(pitch.max(1));
            to.chunks_exact_mut(width.max(1)).zip(rows).for_each(|(to, from)| to.copy_from_slice(&from[..width]));
            Ok(())
        });
        let content = match (copied.is_ok(), content, bytes) {
            (true, Some(mut content), Some(bytes)) => {
                let (width, pitch) = width.map_or((bytes.len(), bytes.len()), |width| (width, 2 * width));
                let rows = bytes.chunks_exact(pitch.max(1));
                content.chunks_exact_mut(width.max(1)).zip(rows).for_each(|(to, from)| {
                    to.copy_from_slice(&from[..width]);
                });
                Some(content)
            }
            _ => None,
        };
        self.pinned.push((target, content));
        self.done(copied.map_err(Error::from));
    }

    /// One value everywhere.
    pub(super) fn fill(&mut self, device: usize, value: u8) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &mut self.devices[device];
        let stream = self.bench.transfer.next_stream(Direction::OnDevice);
        let kernels = self.bench.transfer.allocator().kernels();
        let filled = kernels.and_then(|kernels| Ok(kernels.fill(stream, &mut *buffer, value)?));
        *content = filled.is_ok().then(|| vec![value; buffer.len()]);
        self.done(filled);
    }

    /// From ordinary memory that is handed over.
    pub(super) fn upload_from(&mut self, device: usize, seed: u64) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &mut self.devices[device];
        let bytes = pattern(seed, buffer.len());
        let begun = buffer.upload(bytes.clone(), &self.bench.transfer);
        // Threads may still meet a fault or a cancellation, which only a wait shows.
        *content = (begun.is_ok() && !self.faults).then_some(bytes);
        note(&mut self.uploaded, begun.is_ok(), buffer.len() as u64);
        self.begin(begun.map(Begun::Nothing));
    }

    /// From ordinary memory to a new buffer, which another stream may take over.
    pub(super) fn begin_to_device(&mut self, length: usize, seed: u64, then: bool) {
        let bytes = pattern(seed, LENGTHS[length]);
        let begun = to_device(&self.bench.transfer, bytes.clone(), &self.streams[0]);
        note(&mut self.uploaded, begun.is_ok(), bytes.len() as u64);
        let stream = &self.streams[1];
        let given = begun.and_then(|begun| if then { begun.then(stream, |_, buffer| buffer) } else { begun.wait() });
        if let Some(buffer) = self.done(given) {
            self.devices.push((buffer, (!self.faults || !then).then_some(bytes)));
        }
    }

    /// From the device to ordinary memory.
    pub(super) fn begin_to_vec(&mut self, device: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &self.devices[device];
        let content = content.clone();
        let begun = to_vec(&self.bench.transfer, buffer);
        self.begin(begun.map(|begun| Begun::Bytes(begun, content)));
    }

    /// From the device to new pinned memory.
    pub(super) fn begin_to_host(&mut self, device: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &self.devices[device];
        let content = content.clone();
        let begun = to_pinned(&self.bench.transfer, buffer);
        self.begin(begun.map(|begun| Begun::Host(begun, content)));
    }

    /// From a source that panics where threads of the runtime ask for its slice.
    pub(super) fn upload_panicking(&mut self, device: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &mut self.devices[device];
        let begun = buffer.upload(Owner::new(Panicking(buffer.len())), &self.bench.transfer);
        *content = None;
        let bytes = vec![7; buffer.len()];
        if let Some(begun) = self.done(begun) {
            match begun.wait() {
                Ok(()) => self.devices[device].1 = Some(bytes),
                Err(error) => assert!(self.faults, "{error}"),
            }
        }
    }

    /// Every other byte of rows, from pinned memory.
    pub(super) fn rows(&mut self, pinned: usize, device: usize, width: usize) {
        let Some((device, pinned)) = self.pair(device, pinned) else { return };
        let ((buffer, content), (source, bytes)) = (&mut self.devices[device], &self.pinned[pinned]);
        let (pitch, len) = (2 * width, buffer.len());
        let height = len / pitch;
        let region = Region { extents: &[height, width], from_strides: &[pitch, 1], to_strides: &[pitch, 1] };
        let begun = buffer.upload(region.of(source), &self.bench.transfer);
        *content = match (begun.is_ok(), content.take(), bytes) {
            (true, Some(mut content), Some(bytes)) => {
                for row in 0..height {
                    let range = row * pitch..row * pitch + width;
                    content[range.clone()].copy_from_slice(&bytes[range]);
                }
                Some(content)
            }
            _ => None,
        };
        self.begin(begun.map(Begun::Nothing));
    }

    /// Rows with a byte between them, from ordinary memory that is handed over and has no gaps.
    pub(super) fn rows_from_vec(&mut self, device: usize, seed: u64, width: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &mut self.devices[device];
        let height = buffer.len() / (width + 1);
        let bytes = pattern(seed, height * width);
        let region = Region { extents: &[height, width], from_strides: &[width, 1], to_strides: &[width + 1, 1] };
        let begun = buffer.upload(region.of(bytes.clone()), &self.bench.transfer);
        // As with all of it: threads may still meet a fault.
        *content = content.take().filter(|_| begun.is_ok() && !self.faults);
        for (to, from) in content.iter_mut().flat_map(|content| content.chunks_mut(width + 1)).zip(bytes.chunks(width))
        {
            to[..width].copy_from_slice(from);
        }
        self.begin(begun.map(Begun::Nothing));
    }

    /// The same rows to ordinary memory, where they have no gaps.
    pub(super) fn rows_to_vec(&mut self, device: usize, width: usize) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &self.devices[device];
        let height = buffer.len() / (width + 1);
        let region = Region { extents: &[height, width], from_strides: &[width + 1, 1], to_strides: &[width, 1] };
        let begun = buffer.download(region.of(vec![0; height * width]), &self.bench.transfer);
        let content = content.as_ref().map(|content| {
            let rows = content.chunks_exact(width + 1).flat_map(|row| &row[..width]);
            rows.copied().collect::<Vec<u8>>()
        });
        self.begin(begun.map(|begun| Begun::Bytes(begun, content)));
    }

    /// Copies borrowed memory there and back.
    pub(super) fn borrowed(&mut self, device: usize, seed: u64) {
        let Some(device) = pick(&self.devices, device) else { return };
        let (buffer, content) = &mut self.devices[device];
        let input = pattern(seed, buffer.len());
        let mut output = vec![0; input.len()];
        let transfer = &self.bench.transfer;
        let uploaded = buffer.upload(&input, &transfer);
        let copied = uploaded.and_then(|_in_flight| buffer.download_blocking(&mut output, &transfer));
        *content = (copied.is_ok() || !self.faults).then(|| input.clone());
        if self.done(copied).is_some() {
            assert!(input == output, "what was copied there and back differs");
        }
    }
}

/// Counts an upload that was begun, if there was anything to upload.
fn note(uploaded: &mut (u64, u64), begun: bool, bytes: u64) {
    if begun && bytes > 0 {
        *uploaded = (uploaded.0 + 1, uploaded.1 + bytes);
    }
}
