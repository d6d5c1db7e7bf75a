//! Ordinary memory of any length: if the system refuses it, that is an error rather than the end of
//! the process.

use std::sync::Arc;

use aquifer_device::RequestError;
use bytemuck::{Pod, Zeroable};

use crate::error::TransferError;

/// The number of elements of `size` bytes as a length on the host.
pub(crate) fn len_of(len: u64, size: u64) -> Result<usize, TransferError> {
    let addressable = len.checked_mul(size).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    usize::try_from(len)
        .ok()
        .filter(|_| addressable)
        .ok_or(TransferError::Request(RequestError::LengthOverflow { len, size }))
}

/// `len` elements with all bits 0.
pub(crate) fn zeroed<T: Zeroable>(len: usize) -> Result<Vec<T>, TransferError> {
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| out_of_host_memory(bytes))
}

/// A copy of the first `len` elements in bytes of any alignment. Elements may have no bytes.
pub(crate) fn copied<T: Pod>(bytes: &[u8], len: usize) -> Result<Vec<T>, TransferError> {
    let mut elements = zeroed::<T>(len)?;
    let to: &mut [u8] = bytemuck::cast_slice_mut(&mut elements);
    to.copy_from_slice(&bytes[..to.len()]);
    Ok(elements)
}

fn out_of_host_memory(bytes: u64) -> TransferError {
    TransferError::OutOfHostMemory { bytes, cause: Arc::new(std::io::ErrorKind::OutOfMemory.into()) }
}

#[cfg(test)]
mod tests {
    use aquifer_allocator::{Allocator, Config};
    use aquifer_device::Device;
    use aquifer_device::sim::{SimConfig, SimDriver};
    use aquifer_kernels::DType;

    use super::*;
    use crate::{Tensor, Transfer};

    #[test]
    fn device_memory_that_the_host_has_no_room_for_is_an_error_when_it_is_read() {
        let bytes = 60 << 40;
        if Vec::<u8>::new().try_reserve_exact(60 << 40).is_ok() {
            eprintln!("skipped: this system promises any process any amount of memory");
            return;
        }
        let device = Device::new(SimDriver::new(SimConfig::new(bytes)));
        let allocator = Allocator::new(&device, Config::parse("backing:segments").unwrap()).unwrap();
        let transfer = Transfer::new(&allocator).unwrap();
        let buffer = allocator.alloc::<u32>(usize::try_from(bytes / 4).unwrap(), &device.stream().unwrap()).unwrap();
        let error = transfer.to_vec(&buffer).map(drop).unwrap_err();
        assert!(matches!(error, TransferError::OutOfHostMemory { bytes: asked, .. } if asked == bytes), "{error}");
        drop(buffer);
        let tensor = Tensor::empty(&transfer, DType::F32, &[usize::try_from(bytes / 4).unwrap()]).unwrap();
        for error in [tensor.to_host().map(drop).unwrap_err(), tensor.to_vec_blocking::<f32>().map(drop).unwrap_err()] {
            assert!(error.is_out_of_memory(), "{error}");
        }
    }

    #[test]
    fn refusals_of_the_system_are_errors() {
        let error = zeroed::<u64>(1 << 58).unwrap_err();
        assert!(matches!(error, TransferError::OutOfHostMemory { bytes, .. } if bytes == 1 << 61), "{error}");
        assert!(matches!(zeroed::<u64>(usize::MAX), Err(TransferError::OutOfHostMemory { .. })));
        assert_eq!(copied::<u16>(&[1, 0, 2, 0, 3], 2).unwrap(), [1_u16.to_le(), 2_u16.to_le()]);
        assert!(copied::<u16>(&[], 0).unwrap().is_empty());
        assert_eq!(copied::<()>(&[], 5).unwrap().len(), 5);
    }
}
