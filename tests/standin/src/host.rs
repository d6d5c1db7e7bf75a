//! Pinned host memory: allocated here, or the caller's own and registered.

use std::collections::BTreeMap;
use std::ffi::c_void;

use aquifer_device::{Code, Driver as _, HostPtr};
use parking_lot::Mutex;

use crate::abi::{Answer, Out, abi, check_flags, code, needed};
use crate::process::Life;

/// Portable, mapped, write-combined.
const ALLOC_FLAGS: u32 = 7;
/// Portable, mapped, I/O memory, read-only.
const REGISTER_FLAGS: u32 = 0xf;
/// Pieces smaller than this come from within pages that others have pieces of, too, and start here
/// in one.
const SHARED_BELOW: usize = 64 << 10;
const WITHIN: usize = 512;
/// Memory of another device, which is not there to be registered.
const IO_MEMORY: u32 = 4;

/// A piece of pinned memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    flags: u32,
    /// How far behind the start of the simulated device's allocation it starts.
    within: usize,
    pub(crate) is_registered: bool,
}

/// The pinned memory by address.
#[derive(Debug, Default)]
pub(crate) struct Pinned(Mutex<BTreeMap<usize, Block>>);

impl Pinned {
    /// Bytes that are pinned.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.lock().values().map(|block| block.bytes as u64).sum()
    }

    /// The piece that holds an address.
    pub(crate) fn holding(&self, address: usize) -> Option<Block> {
        let blocks = self.0.lock();
        let (_, block) = blocks.range(..=address).next_back()?;
        (address - block.start < block.bytes).then_some(*block)
    }

    /// Whether a range is all in one piece, or in none: copies take no other.
    pub(crate) fn is_uniform(&self, start: usize, bytes: usize) -> bool {
        if let Some(block) = self.holding(start) {
            return bytes <= block.start + block.bytes - start;
        }
        let end = start.saturating_add(bytes);
        end <= start || self.0.lock().range(start..end).next().is_none()
    }

    fn add(&self, start: usize, bytes: usize, flags: u32, within: usize) {
        self.0.lock().insert(start, Block { start, bytes, flags, within, is_registered: false });
    }

    fn add_registered(&self, start: usize, bytes: usize, flags: u32) {
        self.0.lock().insert(start, Block { start, bytes, flags, within: 0, is_registered: true });
    }

    /// How far behind the start of the simulated device's allocation the piece starts that starts
    /// here.
    fn within(&self, start: usize) -> usize {
        self.0.lock().get(&start).map_or(0, |block| block.within)
    }

    fn remove(&self, start: usize) {
        self.0.lock().remove(&start);
    }
}

impl Life {
    fn host_alloc(&self, out: Out<'_, usize>, bytes: usize, flags: u32) -> Answer {
        check_flags(flags, ALLOC_FLAGS)?;
        let out = needed(out)?;
        let within = if bytes < SHARED_BELOW { WITHIN } else { 0 };
        let ptr = self.sim.host_alloc(bytes + within).map_err(code)?;
        self.pinned.add(ptr.0 + within, bytes, flags, within);
        out.write(ptr.0 + within);
        Ok(())
    }
}

abi! {
    /// Allocates pinned memory. All of it is cached and of this device alone, whatever the
    /// flags ask for.
    2020 cuMemHostAlloc(call, ptr: Out<'_, usize>, bytes: usize, flags: u32) {
        call.guarded_life()?.host_alloc(ptr, bytes, flags)
    }

    /// Allocates pinned memory.
    3020 cuMemAllocHost_v2(call, ptr: Out<'_, usize>, bytes: usize) {
        call.guarded_life()?.host_alloc(ptr, bytes, 0)
    }

    /// Frees pinned memory.
    2000 cuMemFreeHost(call, ptr: usize) {
        let life = call.guarded_life()?;
        // SAFETY: the caller of the C function vouches that the memory is not used any more.
        unsafe { life.sim.host_free(HostPtr(ptr - life.pinned.within(ptr))) }.map_err(code)?;
        life.pinned.remove(ptr);
        Ok(())
    }

    /// Pins the caller's memory.
    6050 cuMemHostRegister_v2(call, ptr: *mut c_void, bytes: usize, flags: u32) {
        let life = call.guarded_life()?;
        check_flags(flags, REGISTER_FLAGS)?;
        if flags & IO_MEMORY != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        // SAFETY: the caller vouches for the memory until it is unregistered.
        let registered = unsafe { life.sim.host_register(ptr.cast(), bytes) }.map_err(code)?;
        life.pinned.add_registered(registered.0, bytes, flags);
        Ok(())
    }

    /// Undoes `cuMemHostRegister_v2`.
    4000 cuMemHostUnregister(call, ptr: usize) {
        let life = call.guarded_life()?;
        // SAFETY: the caller of the C function vouches that it registered the memory.
        unsafe { life.sim.host_unregister(HostPtr(ptr)) }.map_err(code)?;
        life.pinned.remove(ptr);
        Ok(())
    }

    /// The flags that the memory was allocated or registered with.
    2030 cuMemHostGetFlags(call, flags: Out<'_, u32>, ptr: usize) {
        let life = call.life()?;
        let out = needed(flags)?;
        out.write(life.pinned.holding(ptr).ok_or(Code::INVALID_VALUE)?.flags);
        Ok(())
    }
}
