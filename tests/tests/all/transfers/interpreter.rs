//! Runs programs of transfers and compares them with a model of the content of every buffer.

use std::collections::VecDeque;

use aquifer::transfer::{Spillable, Spiller};
use aquifer::{Error, Pending, PinnedBuffer};
use aquifer_tests::prelude::*;
use aquifer_tests::random::pattern;

use super::op::{How, LENGTHS, Op};
use super::{Bench, host};

/// What a buffer holds; `None` where an error left that open.
pub(super) type Content = Option<Vec<u8>>;

/// A transfer that was not waited for yet, and its expected content.
pub(super) enum Begun {
    Nothing(Pending<()>),
    /// A copy between pinned memory.
    Bytes(Pending<Vec<u8>>, Content),
    Host(Pending<PinnedBuffer<u8>>, Content),
}

/// The least priority.
const BACKGROUND: i32 = i32::MAX;

pub(super) struct Interpreter {
    pub(super) bench: Bench,
    pub(super) streams: [Stream; 2],
    pub(super) devices: Vec<(Buffer<u8>, Content)>,
    /// Another device, and buffers there.
    pub(super) peer: Bench,
    pub(super) on_peer: Vec<(Buffer<u8>, Content)>,
    pub(super) spiller: Spiller,
    pub(super) spillable: Vec<(Spillable<u8>, Content)>,
    pub(super) pinned: Vec<(PinnedBuffer<u8>, Content)>,
    begun: VecDeque<Begun>,
    /// Whole buffers that were uploaded, and their bytes: the least that counters may show.
    pub(super) uploaded: (u64, u64),
    /// Forgotten transfers keep what they own.
    forgotten: bool,
    pub(super) faults: bool,
}

impl Interpreter {
    pub(super) fn new(seed: u64, faults: bool) -> Interpreter {
        let bench = Bench::seeded(seed);
        let streams = [bench.device.stream().unwrap(), bench.device.stream().unwrap()];
        // Loaded before anything fails.
        bench.transfer.allocator().kernels().unwrap();
        bench.transfer.at_priority(BACKGROUND).unwrap();
        let spiller = Spiller::new(&bench.transfer, 0).unwrap();
        let mut interpreter = Interpreter {
            bench,
            streams,
            devices: Vec::new(),
            peer: Bench::seeded(seed.wrapping_add(1)),
            on_peer: Vec::new(),
            spiller,
            spillable: Vec::new(),
            pinned: Vec::new(),
            begun: VecDeque::new(),
            uploaded: (0, 0),
            forgotten: false,
            faults,
        };
        for length in 0..LENGTHS.len() {
            interpreter.step(&Op::NewDevice(length));
            interpreter.step(&Op::NewPinned(length, 1));
        }
        interpreter
    }

    /// Whether an operation took place. Without faults it must.
    pub(super) fn done<T, E: Into<Error>>(&self, result: Result<T, E>) -> Option<T> {
        match result.map_err(Into::<Error>::into) {
            Ok(value) => Some(value),
            Err(error) if self.faults => {
                assert!(!error.is_device_lost(), "{error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// A device buffer and a pinned one of the same length.
    pub(super) fn pair(&self, device: usize, pinned: usize) -> Option<(usize, usize)> {
        let device = pick(&self.devices, device)?;
        let len = host(self.devices[device].0.len() as u64);
        let fitting: Vec<usize> = (0..self.pinned.len()).filter(|&index| self.pinned[index].0.len() == len).collect();
        Some((device, *fitting.get(pinned % fitting.len().max(1))?))
    }

    pub(super) fn step(&mut self, op: &Op) {
        match op.clone() {
            Op::NewDevice(length) => self.new_device(length),
            Op::NewPinned(length, seed) => self.new_pinned(length, seed),
            Op::DropDevice(index) => drop_one(&mut self.devices, index),
            Op::DropPinned(index) => drop_one(&mut self.pinned, index),
            Op::Write(index, seed) => self.write(index, seed),
            Op::Read(index) => self.read(index),
            Op::Upload { pinned, device, on } => self.upload(pinned, device, on),
            Op::Download { device, pinned, on } => self.download(device, pinned, on),
            Op::Copy { from, to } => self.copy(from, to),
            Op::OnHost { from, to, width } => self.copy_on_host(from, to, width),
            Op::Fill { device, value } => self.fill(device, value),
            Op::FromVec { device, seed } => self.upload_from(device, seed),
            Op::ToDevice { length, seed, then } => self.begin_to_device(length, seed, then),
            Op::ToVec(device) => self.begin_to_vec(device),
            Op::ToHost(device) => self.begin_to_host(device),
            Op::Rows { pinned, device, width } => self.rows(pinned, device, width),
            Op::RowsFromVec { device, seed, width } => self.rows_from_vec(device, seed, width),
            Op::RowsToVec { device, width } => self.rows_to_vec(device, width),
            Op::Batch { devices, seed } => self.batch(&devices, seed),
            Op::Borrowed { device, seed } => self.borrowed(device, seed),
            Op::Panics(device) => self.upload_panicking(device),
            Op::Finish { pending, how } => {
                let Some(index) = (!self.begun.is_empty()).then(|| pending % self.begun.len()) else { return };
                if let Some(begun) = self.begun.remove(index) {
                    self.end(begun, how);
                }
            }
            Op::Check(device) => {
                if let Some(device) = pick(&self.devices, device) {
                    self.check(device);
                }
            }
            Op::Keep(device) => self.keep(device),
            Op::Spill(index) => self.spill(index),
            Op::Pressure => self.pressure(),
            Op::Access { index, seed, stream } => self.access(index, seed, stream),
            Op::DropSpillable(index) => drop_one(&mut self.spillable, index),
            Op::ToPeer(device) => self.send_to_peer(device),
            Op::FromPeer { peer, device } => self.fetch_from_peer(peer, device),
            Op::CheckPeer(index) => {
                if let Some(index) = pick(&self.on_peer, index) {
                    self.check_peer(index);
                }
            }
            Op::DropPeer(index) => drop_one(&mut self.on_peer, index),
            Op::Trim => {
                let trimmed = self.bench.transfer.pinned().trim_to(0);
                self.done(trimmed.map_err(Error::from));
            }
            Op::Synchronize => self.synchronize(),
            Op::Fault { operation, nth, code } => {
                self.bench.driver.inject(Fault::Nth { operation: Some(operation), nth, code })
            }
        }
    }

    /// Waits for everything at once.
    fn synchronize(&mut self) {
        let waited = [&self.bench, &self.peer].map(|bench| bench.transfer.synchronize());
        if waited.into_iter().filter_map(|waited| self.done(waited.map_err(Error::from))).count() < 2 {
            return;
        }
        for begun in &self.begun {
            let is_done = match begun {
                Begun::Nothing(pending) => pending.is_done(),
                Begun::Bytes(pending, _) => pending.is_done(),
                Begun::Host(pending, _) => pending.is_done(),
            };
            assert_ne!(self.done(is_done), Some(false), "a transfer was not waited for");
        }
    }

    /// A handle whose copies run on one of the program's streams, or on the runtime's, of one
    /// priority as often as of another.
    pub(super) fn on(&self, on: Option<usize>) -> aquifer::transfer::Transfer {
        match on {
            Some(stream) => self.bench.transfer.on(&self.streams[stream]).unwrap(),
            None if self.begun.len() % 2 == 1 => self.bench.transfer.at_priority(BACKGROUND).unwrap(),
            None => self.bench.transfer.clone(),
        }
    }

    pub(super) fn begin(&mut self, begun: Result<Begun, Error>) {
        if let Some(begun) = self.done(begun) {
            self.begun.push_back(begun);
        }
    }

    fn end(&mut self, begun: Begun, how: How) {
        match (begun, how) {
            (Begun::Nothing(pending), How::Cancel) => {
                pending.cancel();
                self.forget_long();
            }
            (Begun::Bytes(pending, _), How::Cancel) => pending.cancel(),
            (Begun::Host(pending, _), How::Cancel) => pending.cancel(),
            (begun, How::Drop) => drop(begun),
            (begun, How::Forget) => {
                self.forgotten |= matches!(begun, Begun::Host(..) | Begun::Bytes(..));
                std::mem::forget(begun);
            }
            (Begun::Nothing(pending), how) => {
                self.done(finish(pending, how));
            }
            (Begun::Bytes(pending, content), how) => {
                let bytes = self.done(finish(pending, how));
                assert!(!differ(bytes.as_deref(), &content), "what came to the host differs");
            }
            (Begun::Host(pending, content), how) => {
                let Some(buffer) = self.done(finish(pending, how)) else { return };
                assert!(!differ(self.done(buffer.read()).as_deref(), &content), "what came to pinned memory differs");
            }
        }
    }

    /// A cancelled long upload may be partial, and so may copies of it: forgets their content.
    fn forget_long(&mut self) {
        let len = 256 << 10;
        let begun = self.begun.iter_mut().filter_map(|begun| match begun {
            Begun::Nothing(_) => None,
            Begun::Bytes(_, content) | Begun::Host(_, content) => Some(content),
        });
        let device = self.devices.iter_mut().chain(&mut self.on_peer).map(|(_, content)| content);
        let spillable = self.spillable.iter_mut().map(|(_, content)| content);
        let pinned = self.pinned.iter_mut().map(|(_, content)| content);
        for content in device.chain(spillable).chain(pinned).chain(begun) {
            *content = content.take().filter(|bytes| bytes.len() <= len);
        }
    }

    /// Uploads the heads of some buffers together, copies each to the next, and reads all of them
    /// back.
    fn batch(&mut self, devices: &[usize], seed: u64) {
        let mut batch = self.bench.transfer.batch();
        let mut expected = Vec::new();
        let mut failed = false;
        let mut touched = Vec::new();
        for (number, &device) in devices.iter().enumerate() {
            let Some(device) = pick(&self.devices, device) else { return };
            let (buffer, content) = &mut self.devices[device];
            let len = buffer.len().min(3000);
            let mut head = buffer.slice_mut(..len);
            let bytes = pattern(seed.wrapping_add(number as u64), len);
            match batch.upload(&bytes, &mut head) {
                Ok(()) => {
                    if let Some(content) = content {
                        content[..len].copy_from_slice(&bytes);
                    }
                }
                Err(error) => {
                    assert!(self.faults, "{error}");
                    failed = true;
                }
            }
            touched.push(device);
        }
        for pair in touched.windows(2) {
            let (from, to) =
                ((self.devices[pair[0]].0.share(), self.devices[pair[0]].1.clone()), &mut self.devices[pair[1]]);
            let len = from.0.len().min(to.0.len()).min(1500);
            // In the same buffer, the range behind the source is written.
            let start = if pair[0] == pair[1] { len } else { 0 };
            if start + len > to.0.len() {
                continue;
            }
            let mut target = to.0.slice_mut(start..start + len);
            batch.copy(&from.0.slice(..len), &mut target).unwrap();
            to.1 = match (to.1.take(), from.1) {
                (Some(mut content), Some(bytes)) => {
                    content[start..start + len].copy_from_slice(&bytes[..len]);
                    Some(content)
                }
                _ => None,
            };
        }
        for &device in &touched {
            let len = self.devices[device].0.len().min(3000);
            let head = self.devices[device].0.slice(..len);
            expected.push((batch.download(&head).unwrap(), device));
        }
        let results = batch.run().and_then(Pending::wait);
        failed |= results.is_err();
        if failed {
            touched.iter().for_each(|&device| self.devices[device].1 = None);
        }
        if self.done(results).is_none() {
            return;
        }
        for (download, device) in expected {
            let Some(bytes) = self.done(download.to_vec()) else { continue };
            let content = self.devices[device].1.as_ref().map(|content| content[..bytes.len()].to_vec());
            assert!(!differ(Some(&bytes), &content), "what a batch brought back differs");
        }
    }

    fn check(&mut self, device: usize) {
        let (buffer, content) = &self.devices[device];
        let bytes = self.done(buffer.to_vec(&self.bench.transfer));
        assert!(!differ(bytes.as_deref(), content), "device memory {device} differs");
    }

    pub(super) fn finish(mut self) {
        self.bench.driver.clear_faults();
        // Faults may have met pending transfers; nothing else fails.
        while let Some(begun) = self.begun.pop_front() {
            self.end(begun, How::Wait);
        }
        self.faults = false;
        (0..self.devices.len()).for_each(|device| self.check(device));
        self.check_spillable();
        (0..self.on_peer.len()).for_each(|index| self.check_peer(index));
        let uploads = self.bench.transfer.counters().uploads;
        let (copies, bytes) = self.uploaded;
        assert!(uploads.copies >= copies && uploads.bytes >= bytes, "{uploads:?}, of {copies} of {bytes} bytes");
        let Interpreter { bench, devices, pinned, peer, on_peer, spiller, spillable, forgotten, .. } = self;
        drop((devices, pinned, on_peer, spillable, spiller));
        if forgotten {
            bench.driver.assert_no_violation();
            peer.driver.assert_no_violation();
        } else {
            bench.finish();
            peer.finish();
        }
    }
}

fn drop_one<T>(all: &mut Vec<T>, index: usize) {
    drop(pick(all, index).map(|index| all.swap_remove(index)));
}

pub(super) fn pick<T>(all: &[T], index: usize) -> Option<usize> {
    (!all.is_empty()).then(|| index % all.len())
}

/// Whether both are known and are not the same.
pub(super) fn differ(bytes: Option<&[u8]>, content: &Content) -> bool {
    matches!((bytes, content), (Some(bytes), Some(content)) if bytes != content)
}

fn finish<T>(pending: Pending<T>, how: How) -> Result<T, Error> {
    match how {
        How::Await => pollster::block_on(pending),
        How::Poll => {
            while !pending.is_done()? {
                std::thread::yield_now();
            }
            pending.wait()
        }
        _ => pending.wait(),
    }
}
