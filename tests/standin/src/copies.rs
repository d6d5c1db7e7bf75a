//! Copies: between host and device, within a device, of rows, and in batches.

use std::ffi::c_void;
use std::sync::Arc;

use aquifer_device::{Code, Copy2d, CopyEnd, CopyPart, DevicePtr, Driver as _, HostPtr, RawStream};

use crate::abi::{Answer, Handle, In, Out, abi, array, code, needed, offer};
use crate::process::{Life, Process};

/// Where copies go that name no stream.
const LEGACY: Handle = RawStream::LEGACY.0;

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    src: Side,
    dst: Side,
    width: usize,
    height: usize,
}

/// One side of it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Side {
    x: usize,
    y: usize,
    kind: u32,
    host: usize,
    device: u64,
    array: Handle,
    pitch: usize,
}

const _: () = assert!(size_of::<Rows>() == 128, "the size that CUDA gives it");

/// How far apart rows may lie, as the attribute says.
const PITCH_MAX: usize = i32::MAX as usize;

/// What memory a side is in.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// Where a side starts: memory that the simulated device knows, or pageable memory.
#[derive(Clone, Copy, Debug)]
enum Start {
    Known(CopyEnd),
    Pageable(usize),
}

impl Side {
    /// Where it starts. What it spans from there does not overflow.
    fn start(&self, life: &Life, width: usize, height: usize) -> Answer<Start> {
        let offset = self.y.checked_mul(self.pitch).and_then(|rows| rows.checked_add(self.x));
        let offset = offset.ok_or(Code::INVALID_VALUE)?;
        let span = height.checked_mul(self.pitch).ok_or(Code::INVALID_VALUE)?;
        if self.x.checked_add(width).is_none_or(|end| end > self.pitch) {
            return Err(Code::INVALID_VALUE);
        }
        match self.kind {
            HOST => {
                let address = self.host.checked_add(offset).filter(|_| self.host != 0).ok_or(Code::INVALID_VALUE)?;
                address.checked_add(span).ok_or(Code::INVALID_VALUE)?;
                let pinned = life.pinned.holding(address).is_some();
                Ok(if pinned { Start::Known(CopyEnd::Host(HostPtr(address))) } else { Start::Pageable(address) })
            }
            DEVICE | UNIFIED => {
                let address = self.device.checked_add(offset as u64).ok_or(Code::INVALID_VALUE)?;
                address.checked_add(span as u64).ok_or(Code::INVALID_VALUE)?;
                let place =
                    if self.kind == DEVICE { Ok(CopyEnd::Device(DevicePtr(address))) } else { place(life, address) };
                place.map(Start::Known)
            }
            ARRAY => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// Host addresses end here: the user half of a 47-bit address space. Those of most simulated
/// devices begin above.
const HOST_END: u64 = 1 << 47;

/// What an address of the one space of host and device means. Pageable memory is refused, and with
/// it an address of device 0 where nothing is any more, which looks the same.
fn place(life: &Life, address: u64) -> Answer<CopyEnd> {
    if let Some(address) = usize::try_from(address).ok().filter(|&address| life.pinned.holding(address).is_some()) {
        return Ok(CopyEnd::Host(HostPtr(address)));
    }
    let ptr = DevicePtr(address);
    let known = || life.sim.allocation_at(ptr).is_some() || life.sim.mapping_at(ptr).is_some();
    if address >= HOST_END || known() { Ok(CopyEnd::Device(ptr)) } else { Err(Code::NOT_SUPPORTED) }
}

/// Refuses host memory in a batch that the device knows by another address, or that is not in one
/// piece. A device reaches for it all the same, and is lost.
fn check_address(life: &Life, end: CopyEnd, bytes: usize) -> Answer {
    let CopyEnd::Host(ptr) = end else { return Ok(()) };
    let fits = life.pinned.holding(ptr.0).is_none_or(|block| !block.is_registered);
    if fits && life.pinned.is_uniform(ptr.0, bytes) { Ok(()) } else { Err(Code::ILLEGAL_ADDRESS) }
}

impl Life {
    /// Waits for the legacy stream, on which copies without a stream go.
    fn wait(&self) -> Answer {
        self.sim.synchronize_stream(RawStream::LEGACY).map_err(code)
    }

    /// Refuses host memory of which a part is pinned, or in several pieces (CUDA driver API,
    /// "API synchronization behavior").
    fn check_uniform(&self, start: usize, bytes: usize) -> Answer {
        if self.pinned.is_uniform(start, bytes) { Ok(()) } else { Err(Code::INVALID_VALUE) }
    }

    /// # Safety
    /// As [`aquifer_device::Driver::copy_to_device`].
    unsafe fn to_device(&self, dst: u64, src: *const c_void, bytes: usize, stream: Handle) -> Answer {
        self.check_uniform(src.addr(), bytes)?;
        // SAFETY: passed on to the caller.
        unsafe { self.sim.copy_to_device(DevicePtr(dst), src.cast(), bytes, RawStream(stream)) }.map_err(code)
    }

    /// # Safety
    /// As [`aquifer_device::Driver::copy_to_host`].
    unsafe fn to_host(&self, dst: *mut c_void, src: u64, bytes: usize, stream: Handle) -> Answer {
        self.check_uniform(dst.addr(), bytes)?;
        // SAFETY: passed on to the caller.
        unsafe { self.sim.copy_to_host(dst.cast(), DevicePtr(src), bytes, RawStream(stream)) }.map_err(code)
    }

    fn on_device(&self, dst: u64, src: u64, bytes: usize, stream: Handle) -> Answer {
        self.sim.copy_on_device(DevicePtr(dst), DevicePtr(src), bytes as u64, RawStream(stream)).map_err(code)
    }

    /// Copies rows. Those of pageable memory go one by one.
    ///
    /// # Safety
    /// Rows on the host must be readable or writable, as for the other copies.
    unsafe fn rows(&self, rows: &Rows, stream: Handle) -> Answer {
        let Rows { src, dst, width, height } = *rows;
        if src.pitch.max(dst.pitch) > PITCH_MAX {
            return Err(Code::INVALID_VALUE);
        }
        let (from, to) = (src.start(self, width, height)?, dst.start(self, width, height)?);
        match (to, from) {
            (Start::Known(to), Start::Known(from)) => {
                let (dst_pitch, src_pitch) = (dst.pitch as u64, src.pitch as u64);
                let copy =
                    Copy2d { dst: to, dst_pitch, src: from, src_pitch, width: width as u64, height: height as u64 };
                // SAFETY: passed on to the caller.
                unsafe { self.sim.copy_2d(&copy, RawStream(stream)) }.map_err(code)
            }
            (Start::Known(CopyEnd::Device(to)), Start::Pageable(from)) => (0..height).try_for_each(|row| {
                let source = std::ptr::with_exposed_provenance(from + row * src.pitch);
                // SAFETY: passed on to the caller.
                unsafe { self.to_device(to.0 + (row * dst.pitch) as u64, source, width, stream) }
            }),
            (Start::Pageable(to), Start::Known(CopyEnd::Device(from))) => (0..height).try_for_each(|row| {
                let target = std::ptr::with_exposed_provenance_mut(to + row * dst.pitch);
                // SAFETY: passed on to the caller.
                unsafe { self.to_host(target, from.0 + (row * src.pitch) as u64, width, stream) }
            }),
            // Copies within the host are for the host to make.
            _ => Err(Code::NOT_SUPPORTED),
        }
    }
}

/// `CUmemcpyAttributes`: when the source may be read, and hints.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchAttributes {
    order: u32,
    hints: [[u32; 2]; 2],
    flags: u32,
}

/// A batch as CUDA describes it.
struct Batch<'a> {
    dsts: &'a [u64],
    srcs: &'a [u64],
    sizes: &'a [usize],
    attributes: &'a [BatchAttributes],
    /// From which copy on each of the attributes counts.
    firsts: &'a [usize],
}

impl Batch<'_> {
    /// # Safety
    /// As [`aquifer_device::Driver::copy_batch`].
    unsafe fn enqueue(&self, life: &Life, stream: Handle) -> Answer {
        let orders =
            self.attributes.iter().all(|attributes| (1..=3).contains(&attributes.order) && attributes.flags <= 1);
        let rising = self.firsts.first() == Some(&0) && self.firsts.is_sorted_by(|a, b| a < b);
        let inside = self.firsts.last().is_some_and(|&last| last < self.sizes.len());
        // The documentation excludes the legacy stream.
        if !orders || !rising || !inside || stream <= LEGACY {
            return Err(Code::INVALID_VALUE);
        }
        let ends = self.dsts.iter().zip(self.srcs).zip(self.sizes);
        let part = |((&dst, &src), &bytes): ((&u64, &u64), &usize)| {
            let (dst, src) = (place(life, dst)?, place(life, src)?);
            [dst, src].into_iter().try_for_each(|end| check_address(life, end, bytes))?;
            Ok(CopyPart { dst, src, bytes: bytes as u64 })
        };
        let copies = ends.map(part).collect::<Answer<Vec<_>>>()?;
        // SAFETY: passed on to the caller.
        unsafe { life.sim.copy_batch(&copies, RawStream(stream)) }.map_err(code)
    }
}

/// Reads the arrays of a batch.
///
/// # Safety
/// Each must be null or have its count of elements.
unsafe fn batch<'a>(
    (dsts, srcs, sizes, count): (*const u64, *const u64, *const usize, usize),
    (attributes, firsts, attribute_count): (*const BatchAttributes, *const usize, usize),
) -> Answer<Batch<'a>> {
    // SAFETY: the caller vouches for the array.
    let dsts = unsafe { array(dsts, count) }?;
    // SAFETY: the caller vouches for the array.
    let srcs = unsafe { array(srcs, count) }?;
    // SAFETY: the caller vouches for the array.
    let sizes = unsafe { array(sizes, count) }?;
    // SAFETY: the caller vouches for the array.
    let attributes = unsafe { array(attributes, attribute_count) }?;
    // SAFETY: the caller vouches for the array.
    let firsts = unsafe { array(firsts, attribute_count) }?;
    Ok(Batch { dsts, srcs, sizes, attributes, firsts })
}

/// What a context stands for.
fn life_of(context: Handle) -> Answer<Arc<Life>> {
    Process::get().context(context)?.life()
}

abi! {
    /// Enqueues a copy from the host. Bytes of pageable memory are taken before this returns.
    3020 cuMemcpyHtoDAsync_v2(call, dst: u64, src: *const c_void, bytes: usize, stream: Handle) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the source, until the copy is done if it is pinned.
        unsafe { life.to_device(dst, src, bytes, stream) }
    }

    /// Enqueues a copy to the host. With pageable memory this returns when the bytes are there.
    3020 cuMemcpyDtoHAsync_v2(call, dst: *mut c_void, src: u64, bytes: usize, stream: Handle) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the target, until the copy is done if it is pinned.
        unsafe { life.to_host(dst, src, bytes, stream) }
    }

    /// Enqueues a copy within the device.
    3020 cuMemcpyDtoDAsync_v2(call, dst: u64, src: u64, bytes: usize, stream: Handle) {
        call.life()?.on_device(dst, src, bytes, stream)
    }

    /// Copies from the host and waits.
    3020 cuMemcpyHtoD_v2(call, dst: u64, src: *const c_void, bytes: usize) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the source; the copy is waited for.
        unsafe { life.to_device(dst, src, bytes, LEGACY) }?;
        life.wait()
    }

    /// Copies to the host and waits.
    3020 cuMemcpyDtoH_v2(call, dst: *mut c_void, src: u64, bytes: usize) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the target; the copy is waited for.
        unsafe { life.to_host(dst, src, bytes, LEGACY) }?;
        life.wait()
    }

    /// Copies within the device, on the legacy stream. As with CUDA, the host does not wait.
    3020 cuMemcpyDtoD_v2(call, dst: u64, src: u64, bytes: usize) {
        call.life()?.on_device(dst, src, bytes, LEGACY)
    }

    /// Enqueues a copy between contexts, on a stream of the device that the copy goes to.
    4000 cuMemcpyPeerAsync(call, dst: u64, to: Handle, src: u64, from: Handle, bytes: usize, stream: Handle) {
        let life = call.guarded_life()?;
        let (to, from) = (life_of(to)?, life_of(from)?);
        // A stream that has a handle of its own need not be of the current context.
        let is_there = |own: &Life| stream > RawStream::PER_THREAD.0 && own.streams.facts(stream).is_ok();
        if !Arc::ptr_eq(&to, &life) && !is_there(&to) {
            return Err(Code::NOT_SUPPORTED);
        }
        to.forbid_in_capture()?;
        let (dst, src) = (DevicePtr(dst), DevicePtr(src));
        to.sim.copy_peer(dst, &*from.sim, src, bytes as u64, RawStream(stream)).map_err(code)
    }

    /// Enqueues a copy of rows.
    3020 cuMemcpy2DAsync_v2(call, rows: In<'_, Rows>, stream: Handle) {
        let life = call.life()?;
        // SAFETY: the caller vouches for rows on the host, as for those of the other copies.
        unsafe { life.rows(needed(rows)?, stream) }
    }

    /// Copies rows and waits.
    3020 cuMemcpy2D_v2(call, rows: In<'_, Rows>) {
        let life = call.life()?;
        // SAFETY: the caller vouches for rows on the host; the copy is waited for.
        unsafe { life.rows(needed(rows)?, LEGACY) }?;
        life.wait()
    }

    /// Enqueues many copies. Host memory must be pinned. Which copy failed is not reported.
    12080 cuMemcpyBatchAsync(
        call, dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attributes: *const BatchAttributes, firsts: *const usize, attribute_count: usize,
        failed: Out<'_, usize>, stream: Handle,
    ) {
        let life = call.life()?;
        offer(failed, usize::MAX);
        // SAFETY: the caller vouches for the arrays.
        let batch = unsafe { batch((dsts, srcs, sizes, count), (attributes, firsts, attribute_count)) }?;
        // SAFETY: the caller vouches for host memory until the copies are done.
        unsafe { batch.enqueue(&life, stream) }
    }

    /// As `cuMemcpyBatchAsync`, in the shape of CUDA 13.
    13000 cuMemcpyBatchAsync_v2(
        call, dsts: *const u64, srcs: *const u64, sizes: *const usize, count: usize,
        attributes: *const BatchAttributes, firsts: *const usize, attribute_count: usize, stream: Handle,
    ) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the arrays.
        let batch = unsafe { batch((dsts, srcs, sizes, count), (attributes, firsts, attribute_count)) }?;
        // SAFETY: the caller vouches for host memory until the copies are done.
        unsafe { batch.enqueue(&life, stream) }
    }
}
