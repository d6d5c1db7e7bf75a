//! Random programs that get device memory in each public way, use it by bare work on the stream
//! that the documentation names (fills and copies with the address, no access guards), and drop it
//! at any time, while other streams take memory and unused memory goes back.

use std::any::Any;

use aquifer::Tensor;
use aquifer::kernels::DType;
use aquifer::tensor::ParamSet;
use aquifer::tensor::To;
use aquifer::transfer::{OnStreams, Prefetcher, Spillable, Spiller};
use aquifer_tests::prelude::*;
use proptest::collection::vec;
use proptest::prelude::*;

use super::{Bench, to_device, to_vec};

/// Small, copied by the caller; staged by threads, twice; of more than a granule.
const SIZES: [u64; 4] = [4 << 10, 300 << 10, 512 << 10, 3 << 20];

/// Nearly all that the device has.
const PRESSURE_BYTES: u64 = 240 << 20;

/// A step: its kind, a size, two streams, and two choices.
type Step = (u8, usize, usize, usize, bool, bool);

const KINDS: u8 = 26;

/// Memory in use, and the stream that may use it.
struct Held {
    ptr: DevicePtr,
    bytes: u64,
    stream: Stream,
    /// What the memory's other users take access guards on, if it was made ready on the stream.
    ready: Option<Buffer<u8>>,
    _own: Box<dyn Any>,
}

struct Raw(Allocator, DevicePtr);

impl Drop for Raw {
    fn drop(&mut self) {
        self.0.free_raw(self.1).unwrap();
    }
}

struct Program {
    bench: Bench,
    streams: Vec<Stream>,
    pool: PrivatePool,
    held: Vec<Held>,
    spiller: Spiller,
    /// With the byte that all of it has.
    spillable: Vec<(Spillable<u8>, u8)>,
    byte: u8,
}

impl Program {
    fn new(seed: u64) -> Program {
        let bench = Bench::seeded(seed);
        let streams = (0..3).map(|_| bench.device.stream().unwrap()).collect();
        let pool = bench.transfer.allocator().create_pool(PoolOptions::default()).unwrap();
        let spiller = Spiller::new(&bench.transfer, 0).unwrap();
        Program { bench, streams, pool, held: Vec::new(), spiller, spillable: Vec::new(), byte: 0 }
    }

    fn step(&mut self, &(kind, size, one, other, long, keep): &Step) {
        let (allocator, transfer) = (self.bench.transfer.allocator().clone(), self.bench.transfer.clone());
        let (bytes, len) = (SIZES[size], super::host(SIZES[size]));
        let (one, other) = (self.streams[one].clone(), self.streams[other].clone());
        let host = || vec![1u8; len];
        let held = match kind {
            0 => of_allocation(allocator.alloc_bytes(bytes, &one).unwrap(), &one),
            1 => of_allocation(allocator.alloc_bytes_zeroed(bytes, &one).unwrap(), &one),
            2 => of_allocation(allocator.alloc_aligned(bytes, 4096, &one).unwrap(), &one),
            3 => of_allocation(self.pool.alloc_bytes(bytes, &one).unwrap(), &one),
            4 => {
                let ptr = allocator.alloc_raw(bytes, &one).unwrap();
                if long {
                    other.wait_for(&one.tick()).unwrap();
                    allocator.record_stream_raw(ptr, &other).unwrap();
                }
                let stream = if long { other } else { one };
                Held { ptr, bytes, stream, ready: None, _own: Box::new(Raw(allocator, ptr)) }
            }
            5 => of_buffer(allocator.alloc(len, &one).unwrap(), &one, false),
            6 => {
                let memory = allocator.alloc_bytes(bytes, &one).unwrap();
                one.fill(memory.ptr(), 3, bytes).unwrap();
                let buffer = allocator.buffer_of::<u8>(memory, &one).unwrap();
                buffer.ready_on(&other).unwrap();
                of_buffer(buffer, &other, true)
            }
            7 => {
                let memory = allocator.alloc_bytes(bytes, &one).unwrap();
                other.wait_for(&one.tick()).unwrap();
                memory.record_stream(&other).unwrap();
                of_allocation(memory, &other)
            }
            8 => {
                let memory = allocator.alloc_bytes(bytes, &one).unwrap();
                one.fill(memory.ptr(), 3, bytes).unwrap();
                other.wait_for(&one.tick()).unwrap();
                other.fill(memory.ptr(), 4, bytes).unwrap();
                return memory.drop_on(&other).unwrap();
            }
            9 => {
                let Ok(mut memory) = allocator.growable(8 << 20, &one) else { return };
                memory.grow_to(bytes, &one).unwrap();
                one.fill(memory.ptr(), 3, bytes).unwrap();
                if long {
                    other.wait_for(&one.tick()).unwrap();
                    memory.grow_to(8 << 20, &other).unwrap();
                }
                let (ptr, bytes, stream) = (memory.ptr(), memory.bytes(), if long { other } else { one });
                Held { ptr, bytes, stream, ready: None, _own: Box::new(memory) }
            }
            10 => {
                let memory = allocator.alloc_exportable(bytes, HandleKind::PosixFd, &one).unwrap();
                Held { ptr: memory.ptr(), bytes, stream: one, ready: None, _own: Box::new(memory) }
            }
            11 => of_buffer(to_device(&transfer, host(), &one).unwrap().wait().unwrap(), &one, false),
            12 => {
                let begun = to_device(&transfer, host(), &one).unwrap();
                begun.then(&other, |stream, buffer| of_buffer(buffer, stream, true)).unwrap()
            }
            13 => {
                let pinned = transfer.pinned().alloc_from(&host()).unwrap();
                let mut buffer: Buffer<u8> = allocator.alloc(len, &one).unwrap();
                let begun = buffer.upload(&pinned, &one).unwrap().map(|()| buffer);
                begun.then(&other, |stream, buffer| of_buffer(buffer, stream, true)).unwrap()
            }
            14 | 15 => return self.prefetch(len, &one, long, keep),
            16 => {
                let mut buffer: Buffer<u8> = allocator.alloc(len, &one).unwrap();
                one.fill(buffer.ptr(), self.byte, bytes).unwrap();
                if long {
                    transfer.allocator().kernels().unwrap().fill(&one, &mut buffer, self.byte).unwrap();
                }
                self.spillable.push((self.spiller.add(buffer, 0).unwrap(), self.byte));
                return;
            }
            17 | 18 => return self.access(size, &one, long),
            19 => {
                let to = To::new().stream(&one);
                let to = if long { to.dtype(DType::F32) } else { to };
                let moved = Tensor::from_vec(host(), &[len]).unwrap().to_with(&transfer, to).unwrap();
                if keep {
                    of_tensor(moved.wait().unwrap(), &one)
                } else {
                    moved.then(&other, |s, t| of_tensor(t, s)).unwrap()
                }
            }
            20 => {
                let there = Tensor::from_vec(host(), &[len]).unwrap().to(&transfer).unwrap().wait().unwrap();
                let again = there.to_with(&transfer, To::new().stream(&other)).unwrap();
                of_tensor(again.wait().unwrap(), &other)
            }
            21 => {
                let there = Tensor::full(&[len / 4], 1.0f32, &transfer).unwrap();
                match (long, keep) {
                    (true, true) => of_tensor(there.add(&there, &one).unwrap(), &one),
                    (true, false) => of_tensor(there.sum(&one).unwrap(), &one),
                    (false, _) => {
                        there.ready_on(&other).unwrap();
                        of_tensor(there, &other)
                    }
                }
            }
            22 => {
                let buffer: Buffer<u8> = allocator.alloc(len, &one).unwrap();
                one.fill(buffer.ptr(), self.byte, bytes).unwrap();
                let tensor = Tensor::from_buffer(&buffer, &[len]).unwrap();
                let read = tensor.to_vec::<u8>().unwrap();
                assert!(
                    read.iter().all(|&byte| byte == self.byte),
                    "a tensor of memory filled without an access guard differs"
                );
                return;
            }
            23 => {
                let mut set = ParamSet::new();
                set.insert("p", Tensor::from_vec(host(), &[len]).unwrap()).unwrap();
                let set = if long {
                    set.to(&transfer).unwrap().then(&other, |_, set| set).unwrap()
                } else {
                    set.move_with_blocking(&transfer, To::new().stream(&one), |_| {}).unwrap();
                    set.move_with_blocking(&transfer, To::new().stream(&other), |_| {}).unwrap();
                    set
                };
                of_tensor(set.get("p").unwrap().clone(), &other)
            }
            24 if size == 3 => {
                // More than is free: memory moves, buffers are spilled, or it is refused.
                match allocator.alloc_bytes(PRESSURE_BYTES, &one) {
                    Ok(memory) => one.fill(memory.ptr(), 5, memory.bytes()).unwrap(),
                    Err(AllocError::OutOfMemory { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                return;
            }
            24 => {
                if keep {
                    self.bench.driver.advance(Duration::from_millis(1));
                }
                if long {
                    allocator.empty_cache().map(drop).unwrap()
                } else {
                    allocator.trim_to(8 << 20).map(drop).unwrap()
                }
                return;
            }
            _ => {
                let at = size + 4 * usize::from(long);
                if at < self.held.len() {
                    drop(self.held.swap_remove(at));
                }
                return;
            }
        };
        self.work(&held, long);
        if keep {
            self.held.push(held);
        }
    }

    /// Bare work: some that lasts, then a fill and a copy. Where others may take access guards on
    /// the memory, a transfer sees what was written.
    fn work(&mut self, Held { ptr, bytes, stream, ready, .. }: &Held, long: bool) {
        self.byte = self.byte.wrapping_add(1);
        if long {
            self.bench.driver.stall(stream, Duration::from_millis(50)).unwrap();
        }
        stream.fill(*ptr, self.byte, *bytes).unwrap();
        stream.copy(ptr.offset(bytes / 2), *ptr, bytes / 2).unwrap();
        if let Some(buffer) = ready {
            let read = to_vec(&self.bench.transfer, buffer).unwrap();
            if !long {
                assert!(read.wait().unwrap().iter().all(|&byte| byte == self.byte), "a download misses bare work");
            }
        }
    }

    fn prefetch(&mut self, len: usize, stream: &Stream, long: bool, keep: bool) {
        let source = (0..3).map(move |_| (vec![1u8; len], Tensor::from_vec(vec![1u8; len / 2], &[len / 2]).unwrap()));
        let batches = Prefetcher::new(source, &self.bench.transfer, stream, 1 + usize::from(keep)).unwrap();
        for batch in batches.take(if long { 3 } else { 2 }) {
            let (bytes, tensor) = batch.unwrap();
            let (bytes, tensor) = (of_buffer(bytes, stream, true), of_tensor(tensor, stream));
            self.work(&bytes, long);
            self.work(&tensor, false);
            if keep {
                self.held.extend([bytes, tensor]);
            }
        }
    }

    fn access(&mut self, at: usize, stream: &Stream, long: bool) {
        let Some((spillable, byte)) = self.spillable.get_mut(at) else { return };
        if !long {
            spillable.spill().unwrap();
        }
        let access = spillable.access(stream).unwrap();
        let read = self.bench.read(&access);
        assert!(read.iter().all(|read| read == byte), "a spilled buffer misses bare work");
        if long {
            self.bench.driver.stall(stream, Duration::from_millis(50)).unwrap();
        }
        *byte = byte.wrapping_add(1);
        stream.fill(access.ptr(), *byte, access.bytes()).unwrap();
    }
}

fn of_allocation(memory: Allocation, stream: &Stream) -> Held {
    Held { ptr: memory.ptr(), bytes: memory.bytes(), stream: stream.clone(), ready: None, _own: Box::new(memory) }
}

fn of_buffer(buffer: Buffer<u8>, stream: &Stream, is_ready: bool) -> Held {
    let ready = is_ready.then(|| buffer.share());
    Held { ptr: buffer.ptr(), bytes: buffer.bytes(), stream: stream.clone(), ready, _own: Box::new(buffer) }
}

fn of_tensor(tensor: Tensor, stream: &Stream) -> Held {
    let (ptr, bytes) = match tensor.dtype() {
        DType::U8 => tensor.device_buffer::<u8>().map(|buffer| (buffer.ptr(), buffer.bytes())),
        _ => tensor.device_buffer::<f32>().map(|buffer| (buffer.ptr(), buffer.bytes())),
    }
    .unwrap();
    Held { ptr, bytes, stream: stream.clone(), ready: None, _own: Box::new(tensor) }
}

#[test]
fn bare_work_on_the_documented_stream_races_with_nothing() {
    let step = (0..KINDS, 0..SIZES.len(), 0usize..3, 0usize..3, any::<bool>(), any::<bool>());
    let strategy = (any::<u64>(), vec(step, 1..16));
    runner::run("bare work", runner::count(150), &strategy, |(seed, steps)| {
        let mut program = Program::new(seed);
        steps.iter().for_each(|step| program.step(step));
        let Program { bench, streams, pool, held, spiller, spillable, .. } = program;
        // In any order, with all of the work pending.
        drop((held, spillable));
        let more: Vec<_> =
            SIZES.iter().map(|&bytes| bench.transfer.allocator().alloc_bytes(bytes, &bench.stream)).collect();
        for memory in more.into_iter().flatten() {
            bench.stream.fill(memory.ptr(), 9, memory.bytes()).unwrap();
        }
        drop((pool, spiller, streams));
        bench.finish();
    });
}

/// Batches are used by work with their address and dropped before the next one comes; then another
/// stream takes the memory.
#[test]
fn prefetched_batches_used_by_bare_work_are_not_overwritten() {
    for seed in 0..20 {
        for drop_first in [false, true] {
            let bench = Bench::seeded(seed);
            let source = (0..4u8).map(|batch| vec![batch; 1 << 18]);
            let mut batches = Prefetcher::new(source, &bench.transfer, &bench.stream, 1).unwrap();
            for _ in 0..3 {
                let batch = batches.next().unwrap().unwrap();
                bench.driver.stall(&bench.stream, Duration::from_millis(50)).unwrap();
                bench.stream.fill(batch.ptr(), 1, batch.bytes()).unwrap();
            }
            let batches = (!drop_first).then_some(batches);
            bench.driver.advance(Duration::from_millis(1));
            let other = bench.device.stream().unwrap();
            let others: Vec<_> =
                (0..6).map(|_| bench.transfer.allocator().alloc_bytes(1 << 18, &other).unwrap()).collect();
            others.iter().for_each(|memory| other.fill(memory.ptr(), 9, memory.bytes()).unwrap());
            bench.device.synchronize().unwrap();
            bench.driver.assert_no_violation();
            drop((batches, others, other));
            bench.finish();
        }
    }
}
