//! The driver's stream-ordered pool: each device has one, which gives memory back as soon as it is
//! not in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use aquifer_device::{Code, Driver as _, PoolUsage};

use crate::abi::{Answer, Call, Handle, In, Out, abi, code, needed};
use crate::process::{Device, Life};

/// The handle of device 0's pool; the next device's is the next number.
const FIRST: Handle = 0xB0_0000_0000_0000;

const RELEASE_THRESHOLD: u32 = 4;

/// Settings of a pool. They are kept, and change nothing: this pool reuses no memory.
#[derive(Debug)]
pub(crate) struct PoolSettings {
    /// Whether memory is reused after events, opportunistically, and by inserting waits, by
    /// attribute from 1.
    reuse: [AtomicBool; 3],
    release_threshold: AtomicU64,
}

impl Default for PoolSettings {
    fn default() -> Self {
        PoolSettings { reuse: [const { AtomicBool::new(true) }; 3], release_threshold: AtomicU64::new(0) }
    }
}

impl PoolSettings {
    fn reuse(&self, attribute: u32) -> Option<&AtomicBool> {
        self.reuse.get(usize::try_from(attribute).ok()?.checked_sub(1)?)
    }
}

/// The handle of a device's pool.
fn handle(ordinal: u32) -> Handle {
    FIRST + u64::from(ordinal)
}

/// The device of a pool.
fn owner(call: &Call, pool: Handle) -> Answer<Arc<Device>> {
    let ordinal = pool.checked_sub(FIRST).and_then(|ordinal| i32::try_from(ordinal).ok());
    call.device(ordinal.ok_or(Code::INVALID_VALUE)?).map_err(|_| Code::INVALID_VALUE)
}

/// Refuses a pool that is not the device's own.
pub(crate) fn check(pool: Handle, life: &Life) -> Answer {
    if pool == handle(life.ordinal) { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// An attribute of the memory that a pool holds.
fn usage(attribute: u32, usage: PoolUsage) -> Answer<u64> {
    Ok(match attribute {
        5 => usage.reserved,
        6 => usage.reserved_peak,
        7 => usage.used,
        8 => usage.used_peak,
        _ => return Err(Code::INVALID_VALUE),
    })
}

abi! {
    /// The pool of a device.
    11020 cuDeviceGetDefaultMemPool(call, pool: Out<'_, Handle>, device: i32) {
        needed(pool)?.write(handle(call.device(device)?.ordinal));
        Ok(())
    }

    /// The current pool of a device: there is only the default one.
    11020 cuDeviceGetMemPool(call, pool: Out<'_, Handle>, device: i32) {
        needed(pool)?.write(handle(call.device(device)?.ordinal));
        Ok(())
    }

    /// Sets the current pool of a device to the one that it has.
    11020 cuDeviceSetMemPool(call, device: i32, pool: Handle) {
        check(pool, &call.device(device)?.life())
    }

    /// A setting of the pool (32 bits for those of reuse), or how much it holds (64 bits).
    11020 cuMemPoolGetAttribute(call, pool: Handle, attribute: u32, value: *mut u64) {
        let life = owner(call, pool)?.life();
        life.count("cuMemPoolGetAttribute");
        if value.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(setting) = life.pool.reuse(attribute) {
            let setting = i32::from(setting.load(Ordering::Relaxed));
            // SAFETY: not null, and for these attributes the caller vouches for an `int`.
            unsafe { value.cast::<i32>().write(setting) };
            return Ok(());
        }
        let number = match attribute {
            RELEASE_THRESHOLD => life.pool.release_threshold.load(Ordering::Relaxed),
            _ => usage(attribute, life.sim.pool_usage().map_err(code)?)?,
        };
        // SAFETY: not null, and for these attributes the caller vouches for a `cuuint64_t`.
        unsafe { value.write(number) };
        Ok(())
    }

    /// Changes a setting of the pool. Peaks cannot be reset.
    11020 cuMemPoolSetAttribute(call, pool: Handle, attribute: u32, value: *const u64) {
        let life = owner(call, pool)?.life();
        if value.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(setting) = life.pool.reuse(attribute) {
            // SAFETY: not null, and for these attributes the caller vouches for an `int`.
            let new = unsafe { value.cast::<i32>().read() };
            setting.store(new != 0, Ordering::Relaxed);
            return Ok(());
        }
        match attribute {
            RELEASE_THRESHOLD => {
                // SAFETY: not null, and for this attribute the caller vouches for a `cuuint64_t`.
                life.pool.release_threshold.store(unsafe { value.read() }, Ordering::Relaxed);
                Ok(())
            }
            6 | 8 => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Gives back what the pool holds unused, down to a number of bytes.
    11020 cuMemPoolTrimTo(call, pool: Handle, keep: usize) {
        let life = owner(call, pool)?.life();
        life.count("cuMemPoolTrimTo");
        life.sim.trim_pool(keep as u64).map_err(code)
    }

    /// Gives back what is kept for graphs with allocations of their own.
    11040 cuDeviceGraphMemTrim(call, device: i32) {
        let life = call.device(device)?.life();
        life.count("cuDeviceGraphMemTrim");
        life.sim.trim_graph_memory().map_err(code)
    }

    /// How much graphs with allocations of their own hold. Peaks are not known.
    11040 cuDeviceGetGraphMemAttribute(call, device: i32, attribute: u32, value: Out<'_, u64>) {
        let life = call.device(device)?.life();
        life.count("cuDeviceGetGraphMemAttribute");
        let value = needed(value)?;
        match attribute {
            2 => value.write(life.sim.pool_usage().map_err(code)?.graphs),
            0 | 1 | 3 => return Err(Code::NOT_SUPPORTED),
            _ => return Err(Code::INVALID_VALUE),
        };
        Ok(())
    }

    /// Refused: devices have the one pool.
    11020 cuMemPoolCreate(call, pool: Out<'_, Handle>, properties: In<'_, u8>) {
        call.process()?;
        needed(pool)?;
        needed(properties)?;
        Err(Code::NOT_SUPPORTED)
    }

    /// Refused: the pool of a device cannot be destroyed.
    11020 cuMemPoolDestroy(call, pool: Handle) {
        owner(call, pool)?;
        Err(Code::INVALID_VALUE)
    }
}
