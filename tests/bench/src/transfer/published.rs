//! Benchmarks of copies that other projects published, with their names: nvbandwidth's copies by
//! the copy engines, and vLLM's `swap_blocks` (`in` is to the device).
//!
//! The method `driver` is one of its calls for each copy; `transfer` and `batch` are ours. On a
//! simulated device the packing of a batch, on the host, does not count. Of both ways, `bytes` and
//! `us` are those that are measured; `us` is for all copies. `of_link` is the share of what the link
//! carries: as simulated, or of PCIe as Linux tells it, where all GPUs have the same.

use aquifer::{Buffer, Pending, Stream};
use aquifer_allocator::AccessGuard;
use aquifer_device::{AccessKind, DevicePtr, HostBuffer};
use aquifer_stress::exit::Failure;

use super::meter::{Meter, rate};
use crate::row::Row;

/// The size of nvbandwidth's copies, in bytes.
const BANDWIDTH_BYTES: u64 = 512 << 20;

/// The sizes of blocks that are swapped, in bytes: 4 KiB to 4 MiB.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 12..=22;

/// The most blocks that are swapped at once.
const BLOCKS_MAX: usize = 256;

/// The copies of the driver alone, and ours.
const DRIVER: &str = "driver";
const TRANSFER: &str = "transfer";

fn row(meter: &Meter, test: &str, method: &str, (copies, bytes): (u64, u64), ns: f64) -> Row {
    let speed = rate(copies * bytes, ns);
    let row = meter.row(false).with("test", test).with("method", method).with("bytes", bytes).with("copies", copies);
    let row = row.us("us", ns).with("gb_per_s", speed);
    row.with("of_link", meter.link_gb_s.map(|limit| speed / limit))
}

/// What runs at once: a direction that is measured, and whether the other one runs beside it.
const BANDWIDTH: [(&str, bool, bool); 4] = [
    ("host_to_device_memcpy_ce", true, false),
    ("device_to_host_memcpy_ce", false, false),
    ("host_to_device_bidirectional_memcpy_ce", true, true),
    ("device_to_host_bidirectional_memcpy_ce", false, true),
];

/// nvbandwidth's copies between pinned memory and the device, by the driver alone and by ours.
pub(super) fn bandwidth(meter: &Meter) -> Result<Vec<Row>, Failure> {
    let bytes = meter.most_of(BANDWIDTH_BYTES);
    let mut rows = Vec::new();
    let (mut target, mut source) = (meter.buffer(bytes)?, meter.buffer(bytes)?);
    // Memory that was never written may not be read.
    source.upload(&meter.pinned(bytes)?, &meter.transfer)?.wait()?;
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let device = meter.transfer.device();
    let mut host = [HostBuffer::new(device, len)?, HostBuffer::new(device, len)?];
    let streams = [meter.stream.clone(), device.stream()?];
    let mut enqueue = |up: bool| -> Result<(), Failure> {
        let (buffer, kind) = if up { (&target, AccessKind::Write) } else { (&source, AccessKind::Read) };
        let (stream, host) = (&streams[usize::from(up)], &mut host[usize::from(up)]);
        let _access = AccessGuard::acquire(stream, &[(buffer.storage(), kind)])?;
        let copy = if up { HostBuffer::upload } else { HostBuffer::download };
        Ok(copy(host, 0, buffer.ptr(), len, stream)?)
    };
    for (test, up, both) in BANDWIDTH {
        let ns = meter.time(|| {
            enqueue(up)?;
            if both {
                enqueue(!up)?;
            }
            Ok(streams[usize::from(up)].synchronize()?)
        })?;
        rows.push((test, row(meter, test, DRIVER, (1, bytes), ns)));
    }
    drop(host);
    let (from, mut to) = (meter.pinned(bytes)?, meter.pinned(bytes)?);
    for (test, up, both) in BANDWIDTH {
        // Its own time counts, so the other one is waited for later.
        let mut beside: Option<Pending<()>> = None;
        let ns = meter.time(|| {
            beside.take().map(Pending::wait).transpose()?;
            let mut start = |up: bool| {
                if up { target.upload(&from, &meter.transfer) } else { source.download(&mut to, &meter.transfer) }
            };
            let measured = start(up)?;
            beside = both.then(|| start(!up)).transpose()?;
            Ok(measured.wait()?)
        })?;
        beside.map(Pending::wait).transpose()?;
        rows.push((test, row(meter, test, TRANSFER, (1, bytes), ns)));
    }
    rows.sort_by_key(|(of, _)| BANDWIDTH.iter().position(|(test, ..)| test == of));
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

/// A cache of blocks on the device and one in pinned memory, and which block goes where.
struct Caches {
    device: Buffer<u8>,
    pinned: HostBuffer,
    host: Vec<u8>,
    /// Pairs of a block on the host and one on the device.
    mapping: Vec<(usize, usize)>,
    bytes: usize,
}

impl Caches {
    fn new(meter: &Meter, count: usize, len: usize) -> Result<Caches, Failure> {
        let mut device = meter.buffer((count * len) as u64)?;
        let host = vec![1; count * len];
        device.upload(host.clone(), &meter.transfer)?.wait()?;
        let pinned = HostBuffer::new(meter.transfer.device(), count * len)?;
        // No two neighbours stay neighbours, and an odd step visits each block of a power of two once.
        let mapping = (0..count).map(|block| (block, (block * 5 + 3) % count)).collect();
        Ok(Caches { device, pinned, host, mapping, bytes: len })
    }

    fn range(&self, block: usize) -> std::ops::Range<usize> {
        block * self.bytes..(block + 1) * self.bytes
    }

    /// As vLLM does it: one call of the driver each.
    fn by_driver(&mut self, stream: &Stream, up: bool) -> Result<(), Failure> {
        let kind = if up { AccessKind::Write } else { AccessKind::Read };
        let _access = AccessGuard::acquire(stream, &[(self.device.storage(), kind)])?;
        let copy = if up { HostBuffer::upload } else { HostBuffer::download };
        for &(on_host, on_device) in &self.mapping {
            let at = DevicePtr(self.device.ptr().0 + (on_device * self.bytes) as u64);
            copy(&mut self.pinned, on_host * self.bytes, at, self.bytes, stream)?;
        }
        Ok(stream.synchronize()?)
    }

    /// As one batch, with what the host packs or unpacks.
    fn batched(&mut self, meter: &Meter, up: bool) -> Result<(), Failure> {
        let mut batch = meter.transfer.batch();
        let block = |caches: &Caches, on_device| caches.device.slice(caches.range(on_device)).share();
        if up {
            for &(on_host, on_device) in &self.mapping {
                batch.upload(&self.host[self.range(on_host)], &mut block(self, on_device))?;
            }
            return Ok(batch.run()?.wait()?);
        }
        let parts = self.mapping.iter().map(|&(on_host, on_device)| {
            let part = batch.download(&block(self, on_device))?;
            Ok((self.range(on_host), part))
        });
        let parts = parts.collect::<Result<Vec<_>, Failure>>()?;
        batch.run()?.wait()?;
        for (range, part) in parts {
            self.host[range].copy_from_slice(&part.to_vec()?);
        }
        Ok(())
    }
}

/// vLLM's `swap_blocks`: scattered blocks of a cache, of 2^k bytes, both ways.
pub(super) fn swap_blocks(meter: &Meter) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for bytes in BLOCK_BYTES.map(|power| 1_usize << power) {
        let blocks = usize::try_from(meter.largest()).unwrap_or(usize::MAX) / bytes;
        let blocks = blocks.min(BLOCKS_MAX);
        if blocks < 8 {
            break;
        }
        let blocks = 1 << blocks.ilog2();
        let copied = (blocks as u64, bytes as u64);
        let mut caches = Caches::new(meter, blocks, bytes)?;
        for (test, up) in [("swap_blocks, in", true), ("swap_blocks, out", false)] {
            let ns = meter.time(|| caches.by_driver(&meter.stream, up))?;
            rows.push(row(meter, test, DRIVER, copied, ns));
            let ns = meter.time(|| caches.batched(meter, up))?;
            rows.push(row(meter, test, "batch", copied, ns));
        }
    }
    Ok(rows)
}
