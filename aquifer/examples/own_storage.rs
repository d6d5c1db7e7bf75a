//! A tensor type of another crate over Aquifer's memory: docs/your-own-storage.md.
use std::sync::Arc;

use aquifer::device::{HostKernel, KernelArg, Launch};
use aquifer::prelude::*;

struct Matrix {
    data: Buffer<f32>,
    shape: [u32; 2],
    strides: [u32; 2],
}

#[derive(Debug)]
enum MyError {
    Empty([u32; 2]),
    Memory(aquifer::Error),
}

/// Of every call here and of `with`.
impl<E: Into<aquifer::Error>> From<E> for MyError {
    fn from(error: E) -> MyError {
        MyError::Memory(error.into())
    }
}

impl Matrix {
    fn new(shape: [u32; 2], memory: &Allocator, stream: &Stream) -> Result<Matrix, MyError> {
        let len = shape[0] as usize * shape[1] as usize;
        let data = if len > 0 { memory.alloc(len, stream)? } else { return Err(MyError::Empty(shape)) };
        Ok(Matrix { data, shape, strides: [shape[1], 1] })
    }

    /// A view: the memory lives as long as one of the handles.
    fn transposed(&self) -> Matrix {
        let ([rows, columns], [down, right]) = (self.shape, self.strides);
        Matrix { data: self.data.share(), shape: [columns, rows], strides: [right, down] }
    }

    /// Gives each element its number in the order of rows, by a kernel of one's own.
    fn number(&mut self, stream: &Stream) -> Result<(), MyError> {
        let [rows, columns, down, right] = [self.shape, self.strides].concat()[..] else { unreachable!() };
        Ok(with(stream, [write(&mut self.data)], |stream, [data]| {
            let launch = Launch {
                name: "number",
                module: None, // on a GPU: Some(device.driver().load_module(PTX)?), once
                grid: [rows.div_ceil(256), columns, 1],
                block: [256, 1, 1],
                args: [&[KernelArg::Ptr(data.ptr())][..], &[rows, columns, down, right].map(KernelArg::U32)].concat(),
                accesses: vec![data.range()],
                host: Some(on_host()),
                ..Launch::default()
            };
            // SAFETY: the kernel takes these arguments, and writes `data` alone.
            unsafe { stream.launch(&launch) }
        })?)
    }
}

/// The kernel as a simulated device runs it; a GPU runs the module.
fn on_host() -> HostKernel {
    Arc::new(|memory, args| {
        if let &[KernelArg::Ptr(at), KernelArg::U32(rows), KernelArg::U32(columns), down, right] = args
            && let (KernelArg::U32(down), KernelArg::U32(right)) = (down, right)
        {
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let (place, number) = (row * down + column * right, (row * columns + column) as f32);
                memory.write(at.offset(4 * u64::from(place)), &number.to_ne_bytes())?;
            }
        }
        Ok(())
    })
}

fn main() -> Result<(), MyError> {
    let device = aquifer::open("sim:1GiB,violations=panic")?;
    let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
    let matrix = Matrix::new([2, 3], &memory, &one)?;
    let mut view = matrix.transposed();
    view.number(&two)?; // after what `one` does with the memory
    drop(view); // on any thread, at any time: no call of the driver, no wait
    println!("{:?}", matrix.data.to_vec(&one)?); // after the kernel on `two`
    assert_eq!(matrix.data.to_vec(&one)?, [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
    assert!(matches!(Matrix::new([0, 3], &memory, &one), Err(MyError::Empty([0, 3]))));
    assert!(
        matches!(Matrix::new([1 << 30; 2], &memory, &one), Err(MyError::Memory(error)) if error.is_out_of_memory())
    );
    Ok(())
}
