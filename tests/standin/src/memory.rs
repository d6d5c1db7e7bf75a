//! Plain allocations and the driver's stream-ordered pool, through which memory is allocated and
//! freed in the order of a stream.

use aquifer_device::{Code, DevicePtr, Driver as _, RawStream};

use crate::abi::{Answer, Handle, Out, abi, code, needed};
use crate::pools;
use crate::process::Life;

/// Allocates from the pool.
fn alloc_async(life: &Life, out: Out<'_, u64>, bytes: usize, stream: Handle) -> Answer {
    let out = needed(out)?;
    let ptr = life.sim.alloc_async(bytes as u64, RawStream(stream)).map_err(code)?;
    out.write(ptr.0);
    Ok(())
}

abi! {
    /// Free and total memory in bytes.
    3020 cuMemGetInfo_v2(call, free: Out<'_, usize>, total: Out<'_, usize>) {
        let life = call.life()?;
        let (free, total) = (needed(free)?, needed(total)?);
        let info = life.sim.memory_info().map_err(code)?;
        let fits = |bytes: u64| usize::try_from(bytes).map_err(|_| Code::INVALID_VALUE);
        free.write(fits(info.free)?);
        total.write(fits(info.total)?);
        Ok(())
    }

    /// Allocates memory.
    3020 cuMemAlloc_v2(call, ptr: Out<'_, u64>, bytes: usize) {
        let life = call.guarded_life()?;
        let out = needed(ptr)?;
        out.write(life.sim.alloc(bytes as u64).map_err(code)?.0);
        Ok(())
    }

    /// Frees memory, the pool's too, once the device is idle. Null is freed without effect.
    3020 cuMemFree_v2(call, ptr: u64) {
        let life = call.guarded_life()?;
        if ptr == 0 {
            return Ok(());
        }
        life.sim.free(DevicePtr(ptr)).map_err(code)
    }

    /// Allocates from the current pool of the device.
    11020 cuMemAllocAsync(call, ptr: Out<'_, u64>, bytes: usize, stream: Handle) {
        alloc_async(&*call.life()?, ptr, bytes, stream)
    }

    /// Allocates from a pool.
    11020 cuMemAllocFromPoolAsync(call, ptr: Out<'_, u64>, bytes: usize, pool: Handle, stream: Handle) {
        let life = call.life()?;
        pools::check(pool, &life)?;
        alloc_async(&life, ptr, bytes, stream)
    }

    /// Frees to the pool, once the stream gets there. Null is freed without effect.
    11020 cuMemFreeAsync(call, ptr: u64, stream: Handle) {
        let life = call.life()?;
        if ptr == 0 {
            return Ok(());
        }
        life.sim.free_async(DevicePtr(ptr), RawStream(stream)).map_err(code)
    }
}
