//! A program of an embedder that holds cudarc's streams and memory. Without a driver forebay answers with an error, and
//! nothing ends the program; see Cargo.toml.

use cudarc::driver::CudaContext;
use forebay::device::cuda::{CudaDevice, CudaOptions};

fn main() {
    println!("beside {}:", std::any::type_name::<CudaContext>());
    // cudarc ends the program where there is no driver: forebay is asked first.
    if let Err(error) = CudaDevice::count(&CudaOptions::default()) {
        return println!("{error}");
    }
    match CudaContext::new(0) {
        Ok(context) => match forebay_embedder::decode(&context, None) {
            Ok(line) => println!("{line}"),
            Err(error) => println!("{error}"),
        },
        Err(error) => println!("{error:?}"),
    }
}
